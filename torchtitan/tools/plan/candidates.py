"""Possible layouts of a job over a number of ranks.

There are hundreds, and each rehearsal takes seconds. So formulas rank all of them (`formulas.py`),
and the best few are rehearsed (`layout.py`).

Candidates have powers of two for tp (within a machine), cp (down to 4096 tokens per rank), pp, ep
and copies of the model; microbatches of 1 to 8 samples; recomputation of no, every fourth, every
second or all blocks, or by operator; and the schedules 1F1B, Interleaved1F1B and ZBVZeroBubble. The
samples of a step are constant: fewer data-parallel ranks accumulate more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from torchtitan.base.errors import ConfigError
from torchtitan.job import Config
from torchtitan.mesh.dims import ParallelDims
from torchtitan.parallel.pipeline.schedules import SCHEDULES, check_schedule
from torchtitan.tools.plan.job import Planned, place

Recompute = Literal["none", "4", "2", "op", "full"]
RECOMPUTES: Sequence[Recompute] = ("none", "4", "2", "op", "full")
Pipelining = Literal["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
PIPELINES: Sequence[Pipelining] = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
LEAST_SEQUENCE = 4096
"""Least number of tokens of a sequence per rank of cp."""
MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout, with memory and time by the formulas."""

    dims: ParallelDims
    schedule: Pipelining
    microbatch: int
    """Samples per microbatch."""
    num_microbatches: int
    """Microbatches of a rank per step."""
    recompute: Recompute
    seconds: float = 0.0
    memory: float = 0.0
    """Bytes on the fullest rank."""

    def apply(self, config: Config) -> Config:
        """Return the job in this layout."""
        dims, training = self.dims, config.training
        num, size = self.num_microbatches, self.microbatch
        is_staged = dims.pp > 1
        parallelism = replace(
            config.parallelism,
            data_parallel_replicate_degree=dims.dp_replicate,
            data_parallel_shard_degree=dims.dp_shard,
            tensor_parallel_degree=dims.tp,
            context_parallel_degree=dims.cp,
            pipeline_parallel_degree=dims.pp,
            expert_parallel_degree=dims.ep,
            pipeline_parallel_schedule=self.schedule if is_staged else "1F1B",
            pipeline_parallel_microbatch_size=size if is_staged else 1,
        )
        mode, recompute = config.activation_checkpoint, self.recompute
        if recompute in ("none", "full"):
            mode = replace(mode, mode=recompute)
        else:
            mode = replace(mode, mode="selective", selective_ac_option=recompute)
        local = size * num if is_staged else size
        training = replace(training, local_batch_size=local, global_batch_size=size * num * dims.dp)
        return replace(
            config,
            parallelism=parallelism,
            activation_checkpoint=mode,
            training=training,
        )

    def __str__(self) -> str:
        pipelined = f", {self.schedule}" if self.dims.pp > 1 else ""
        return (
            f"{self.dims}{pipelined}, {self.num_microbatches} x {self.microbatch} samples, "
            f"recompute {self.recompute}"
        )


def place_again(planned: Planned, candidate: Candidate) -> Planned:
    """Return the job in another layout.

    Raises:
        ConfigError: The rules do not allow it.
    """
    return place(
        candidate.apply(planned.config),
        world_size=candidate.dims.world_size,
        device=planned.device,
        gpus_per_node=planned.gpus_per_node,
    )


def enumerate_layouts(planned: Planned, *, samples: int) -> Iterator[Candidate]:
    """Yield all candidates. The model's rules are checked for tp and ep only."""
    config, world = planned.config, planned.world_size
    num_layers, seq_len = planned.layout.architecture.num_layers, config.training.seq_len
    within = min(planned.gpus_per_node, world)
    tps = [tp for tp in _powers(within) if _allows(planned, ParallelDims(tp=tp))]
    eps = [1]
    if planned.layout.counts.num_experts:
        eps = [n for n in _powers(world) if _allows(planned, ParallelDims(dp_shard=n, ep=n))]
    cps = [cp for cp in _powers(seq_len // LEAST_SEQUENCE) if cp <= world]
    pps = _powers(min(num_layers, world))
    for tp, cp, pp in product(tps, cps, pps):
        if world % (tp * cp * pp):
            continue
        dp = world // (tp * cp * pp)
        for copies, ep, size in product(_powers(dp), eps, MICROBATCHES):
            shard = dp // copies
            if dp % copies or (copies > 1 and shard * cp * tp < within) or samples % (dp * size):
                continue
            if shard * cp * tp % ep:
                continue
            dims = ParallelDims(pp=pp, dp_replicate=copies, dp_shard=shard, cp=cp, tp=tp, ep=ep)
            num = samples // (dp * size)
            for schedule, recompute in product(PIPELINES if pp > 1 else ("1F1B",), RECOMPUTES):
                if pp == 1 or _schedules(schedule, pp, num, num_layers, recompute):
                    yield Candidate(
                        dims=dims,
                        schedule=schedule,
                        microbatch=size,
                        num_microbatches=num,
                        recompute=recompute,
                    )


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(max(1, most).bit_length())]


def _allows(planned: Planned, dims: ParallelDims) -> bool:
    """Return whether the rules allow the degrees for this model."""
    candidate = Candidate(
        dims=dims, schedule="1F1B", microbatch=1, num_microbatches=1, recompute="full"
    )
    try:
        place_again(planned, candidate)
    except ConfigError:
        return False
    return True


def _schedules(
    schedule: Pipelining, pp: int, num_microbatches: int, num_layers: int, recompute: Recompute
) -> bool:
    """Return whether the schedule can run with these numbers."""
    stages = num_stages_per_rank(schedule)
    is_split = SCHEDULES[schedule].splits_backward
    if pp * stages > num_layers or (is_split and recompute != "none"):
        return False
    try:
        check_schedule(schedule, pp=pp, stages_per_rank=stages, num_microbatches=num_microbatches)
    except ConfigError:
        return False
    return True


def num_stages_per_rank(schedule: Pipelining) -> int:
    """Return the usual number of stages on a rank."""
    return 2 if SCHEDULES[schedule].multi_stage else 1
