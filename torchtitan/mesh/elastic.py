"""Which layout a job takes on the ranks that are there, when it may lose nodes (`--nnodes 2:4`).

torchrun starts the ranks again on the nodes that are left. The layout on all nodes is the job's
own; with fewer ranks only the degrees in `elastic.adjustable_degrees` change. The global batch
stays what it is on all nodes: each rank accumulates more microbatches, so the run stays the same
training and every sample is read once. Other trainers let the batch shrink with the nodes and scale
the learning rate; that is a different training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torchtitan.base.errors import ConfigError
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import ParallelDims, resolve_dims
from torchtitan.mesh.settings import ElasticConfig, ParallelismConfig

FULL_WORLD_SIZE = "TORCHTITAN_FULL_WORLD_SIZE"
"""Set by the launcher of a job that may lose nodes: number of ranks on all nodes."""
STARTED = "TORCHTITAN_STARTED"
"""Set by the launcher: when it started, by its machine's monotonic clock. torchrun may start the
ranks again; the job's wall-clock limit counts from here."""


def fit_ranks(
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    *,
    settings: ElasticConfig,
    world_size: int,
    can_resume: bool,
    environ: Mapping[str, str],
) -> tuple[ParallelismConfig, TrainingConfig]:
    """Return the settings for `world_size` ranks; as given where no node may be lost.

    Raises:
        ConfigError: No allowed layout fits them, or the job saves no checkpoints.
    """
    if FULL_WORLD_SIZE not in environ:
        return parallelism, training
    if not can_resume:
        raise ConfigError.at(
            "checkpoint.enable",
            "must be true in a job that may lose nodes (--nnodes MIN:MAX): it resumes from its "
            "checkpoints",
        )
    full = resolve_dims(parallelism, world_size=int(environ[FULL_WORLD_SIZE]))
    batch = training.global_batch_size
    if batch == -1:
        batch = training.local_batch_size * full.dp
    for candidate in _candidates(parallelism, full=full, settings=settings, world_size=world_size):
        try:
            dims = resolve_dims(candidate, world_size=world_size)
        except ConfigError:  # such as experts that cannot be divided among these ranks
            continue
        if batch % (training.local_batch_size * dims.dp) == 0:
            return candidate, replace(training, global_batch_size=batch)
    raise ConfigError.at(
        ("elastic.adjustable_degrees", "training.global_batch_size"),
        f"allows no layout of {world_size} ranks with a global batch of {batch}; start all nodes, "
        f"with {full.world_size} ranks",
    )


def _candidates(
    parallelism: ParallelismConfig, *, full: ParallelDims, settings: ElasticConfig, world_size: int
) -> Iterator[ParallelismConfig]:
    """Yield the layouts of `world_size` ranks, best first: the job's own; as many shards as on all
    nodes, since then a rank's memory does not grow; as many replicas; fewer replicas."""
    dp, rest = divmod(world_size, full.world_size // full.dp)
    if rest or not dp:
        return
    replicas = [full.dp_replicate]
    if "dp_replicate" in settings.adjustable_degrees:
        replicas = [dp // full.dp_shard, *range(min(full.dp_replicate, dp), 0, -1)]
    for dp_replicate in replicas:
        if not dp_replicate or dp % dp_replicate:
            continue
        dp_shard = dp // dp_replicate
        if dp_shard == full.dp_shard or "dp_shard" in settings.adjustable_degrees:
            yield replace(
                parallelism,
                data_parallel_replicate_degree=dp_replicate,
                data_parallel_shard_degree=dp_shard,
            )


def started(environ: Mapping[str, str]) -> float | None:
    """Return when the launcher started, by the monotonic clock; None without a launcher."""
    return float(environ[STARTED]) if STARTED in environ else None
