"""Which layout a job takes on the nodes that it has, when it may lose some (`--nnodes 2:4`).

The layout on all nodes is the job's own. With fewer, only the degrees change that
`elastic.may_change` names, and the global batch stays what it is on all nodes: each rank
accumulates more microbatches. So the run stays the same training, and every sample is read in its
turn. Others let the batch shrink with the nodes and scale the learning rate; that is another
training. Whole nodes are used or none: of those that are there, as many as some layout fits, and
the others stand by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torchtitan.base.errors import ConfigError
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import resolve_dims
from torchtitan.mesh.settings import ElasticConfig, ParallelismConfig

FULL_WORLD_SIZE = "TORCHTITAN_FULL_WORLD_SIZE"
"""Set by the launcher where nodes may come and go: the ranks of the job on all of them."""
STARTED = "TORCHTITAN_STARTED"
"""Set with it: when the launcher started, by its machine's monotonic clock. Ranks start anew at
each meeting; the job's wall-clock limit does not."""


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The layouts that a job may take; `full_world_size` is its ranks on all nodes."""

    parallelism: ParallelismConfig
    training: TrainingConfig
    settings: ElasticConfig
    full_world_size: int

    @property
    def global_batch_size(self) -> int:
        """Samples of a step, on any number of nodes."""
        given = self.training.global_batch_size
        if given != -1:
            return given
        dims = resolve_dims(self.parallelism, world_size=self.full_world_size)
        return self.training.local_batch_size * dims.dp

    def find(self, world_size: int) -> tuple[ParallelismConfig, TrainingConfig] | None:
        """Return the settings for so many ranks; None: no layout that is allowed fits them.

        Raises:
            ConfigError: The degrees do not fit the ranks of all nodes.
        """
        batch = self.global_batch_size
        for parallelism in self._candidates(world_size):
            try:
                dims = resolve_dims(parallelism, world_size=world_size)
            except ConfigError:  # of experts, say, that cannot be dealt out to so few
                continue
            if batch % (self.training.local_batch_size * dims.dp) == 0:
                return parallelism, replace(self.training, global_batch_size=batch)
        return None

    def _candidates(self, world_size: int) -> Iterator[ParallelismConfig]:
        """Yield the settings that give so many ranks, the best first: the job's own; as many shards
        as on all nodes, since then a rank holds what it held; as many copies; fewer copies."""
        own = resolve_dims(self.parallelism, world_size=self.full_world_size)
        dp, rest = divmod(world_size, own.world_size // own.dp)
        if rest or not dp:
            return
        allowed = self.settings.may_change
        copies = [own.dp_replicate]
        if "dp_replicate" in allowed:
            copies = [dp // own.dp_shard, *range(min(own.dp_replicate, dp), 0, -1)]
        for dp_replicate in copies:
            if not dp_replicate or dp % dp_replicate:
                continue
            dp_shard = dp // dp_replicate
            if dp_shard == own.dp_shard or "dp_shard" in allowed:
                yield replace(
                    self.parallelism,
                    data_parallel_replicate_degree=dp_replicate,
                    data_parallel_shard_degree=dp_shard,
                )

    def nodes_to_use(self, num_nodes: int, *, fewest: int, ranks_per_node: int) -> int:
        """Return how many of so many nodes some layout fits, at least `fewest`; 0: none does."""
        for used in range(num_nodes, max(fewest, 1) - 1, -1):
            if self.find(used * ranks_per_node) is not None:
                return used
        return 0

    def check(self, *, fewest: int, ranks_per_node: int) -> None:
        """Refuse a job that can change and yet could not go on with the fewest nodes it names.

        Raises:
            ConfigError: Names the batch, or the degrees.
        """
        most = self.full_world_size // ranks_per_node
        resolve_dims(self.parallelism, world_size=self.full_world_size)
        if not self.settings.may_change:
            return
        if not self.nodes_to_use(fewest, fewest=fewest, ranks_per_node=ranks_per_node):
            fits = [n for n in range(1, most + 1) if self.find(n * ranks_per_node) is not None]
            raise ConfigError.at(
                ("elastic.may_change", "training.global_batch_size"),
                f"no layout that it allows ({', '.join(self.settings.may_change)}) fits {fewest} "
                f"nodes of {ranks_per_node} ranks with a global batch of {self.global_batch_size}, "
                f"a multiple of local_batch_size ({self.training.local_batch_size}) x data-parallel"
                f" ranks; these numbers of nodes fit: {', '.join(map(str, fits)) or 'none'}. Start "
                f"with --nnodes of such a number, or choose another batch",
            )


def fit_ranks(
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    *,
    settings: ElasticConfig,
    world_size: int,
    environ: Mapping[str, str],
) -> tuple[ParallelismConfig, TrainingConfig]:
    """Return the settings for the ranks that are here; as given where no node may be lost.

    Raises:
        ConfigError: No layout that is allowed fits them.
    """
    full = environ.get(FULL_WORLD_SIZE)
    if full is None:
        return parallelism, training
    layouts = Layouts(
        parallelism=parallelism, training=training, settings=settings, full_world_size=int(full)
    )
    found = layouts.find(world_size)
    if found is None:
        raise ConfigError.at(
            ("elastic.may_change", "training.global_batch_size"),
            f"allows no layout of {world_size} ranks that holds the global batch of "
            f"{layouts.global_batch_size}; start all nodes, with {full} ranks",
        )
    return found


def started(environ: Mapping[str, str]) -> float | None:
    """Return when the launcher of a job that may lose nodes started; None: it may not."""
    return float(environ[STARTED]) if STARTED in environ else None
