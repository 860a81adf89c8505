"""The layout of a run that has lost nodes.

If nodes may be lost (`--nnodes 2:4`), torchrun restarts the ranks on the remaining nodes, and
`fit_ranks` chooses another layout: only the degrees in `elastic.adjustable_degrees` change. Each
rank accumulates more microbatches, so the global batch, and with it the training, stays the same.
Other trainers let the batch shrink with the nodes and scale the learning rate, which is a different
training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torchtitan.base.errors import ConfigError
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import ParallelDims, resolve_dims
from torchtitan.mesh.settings import ElasticConfig, ParallelismConfig


def fit_ranks(
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    *,
    settings: ElasticConfig,
    world_size: int,
    full_world_size: int,
    can_resume: bool,
) -> tuple[ParallelismConfig, TrainingConfig]:
    """Return the settings for `world_size` ranks.

    Args:
        parallelism: The section [parallelism], for all nodes.
        training: The section [training].
        settings: The section [elastic].
        world_size: Ranks of this start.
        full_world_size: Ranks on all nodes.
        can_resume: The job saves checkpoints.

    Raises:
        ConfigError: No allowed layout fits, or the job saves no checkpoints.
    """
    if not can_resume:
        raise ConfigError.at(
            "checkpoint.enable",
            "must be true in a job that may lose nodes (--nnodes MIN:MAX): it resumes from its "
            "checkpoints",
        )
    full = resolve_dims(parallelism, world_size=full_world_size)
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
    """Yield layouts of `world_size` ranks, best first: the job's degrees; the same number of shards
    as on all nodes, which keeps a rank's memory; the same number of replicas; fewer replicas."""
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
