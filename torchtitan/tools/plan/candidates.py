"""Possible layouts of a job over a number of ranks.

There are hundreds, and each rehearsal takes seconds. So formulas rank all of them (`formulas.py`),
and the best few are rehearsed (`layout.py`).

Candidates have powers of two for tp (within a machine), cp (down to 4096 tokens per rank), pp, ep
and copies of the model; microbatches of 1 to 8 samples; recomputation of no, every fourth, every
second or all blocks, or by operator; and the schedules 1F1B, Interleaved1F1B (2 or 4 stages per
rank; 4 where `layers_per_stage` can make that many) and ZBVZeroBubble. Stages that the job sets are
replaced. The samples of a step are constant: fewer data-parallel ranks accumulate more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Literal

from torchtitan.base.errors import ConfigError
from torchtitan.job import Config
from torchtitan.layout import check_model
from torchtitan.mesh.dims import ParallelDims
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.interface import LanguageModel
from torchtitan.parallel.pipeline.layout import end_weights
from torchtitan.parallel.pipeline.schedules import SCHEDULES, check_schedule
from torchtitan.tools.plan.job import Planned, plan_config

Recompute = Literal["none", "4", "2", "op", "full"]
RECOMPUTES: Sequence[Recompute] = ("none", "4", "2", "op", "full")
Pipelining = Literal["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
PIPELINES: Sequence[tuple[Pipelining, int]] = (
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("ZBVZeroBubble", 2),
)
"""Schedules with the stages per rank."""
ENDS = sum(end_weights(ParallelismConfig()))
"""Layers that embedding and head count as, if `layers_per_stage` is set."""
LEAST_SEQUENCE = 4096
"""Least number of tokens of a sequence per rank of cp."""
MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout, with memory and time by the formulas."""

    dims: ParallelDims
    schedule: Pipelining
    stages: int
    """Stages per rank."""
    microbatch: int
    """Samples per microbatch."""
    num_microbatches: int
    """Microbatches of a rank per step."""
    recompute: Recompute
    layers_per_stage: int | None = None
    """The setting, if `stages` is not the schedule's usual number."""
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
            pipeline_parallel_layers_per_stage=self.layers_per_stage,
            module_fqns_per_model_part=(),
        )
        if self.layers_per_stage is not None:
            parallelism = replace(
                parallelism,
                pipeline_parallel_first_stage_less_layers=None,
                pipeline_parallel_last_stage_less_layers=None,
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
        if self.layers_per_stage is not None:
            pipelined += f" of {self.stages} stages per rank"
        return (
            f"{self.dims}{pipelined}, {self.num_microbatches} x {self.microbatch} samples, "
            f"recompute {self.recompute}"
        )


def place_again(planned: Planned, candidate: Candidate) -> Planned:
    """Return the job in another layout; raise ConfigError if the rules do not allow it."""
    return plan_config(
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
    model = planned.layout.spec.build_meta(planned.layout.architecture)
    tps = [tp for tp in _powers(within) if _allows(planned, model, ParallelDims(tp=tp))]
    eps = [1]
    if planned.layout.counts.num_experts:
        eps = [n for n in _powers(world) if _allows(planned, model, ParallelDims(dp_shard=n, ep=n))]
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
            pipelines = PIPELINES if pp > 1 else PIPELINES[:1]
            for (schedule, stages), recompute in product(pipelines, RECOMPUTES):
                is_usual = stages == SCHEDULES[schedule].usual_stages
                candidate = Candidate(
                    dims=dims,
                    schedule=schedule,
                    microbatch=size,
                    num_microbatches=num,
                    recompute=recompute,
                    stages=stages,
                    layers_per_stage=None
                    if is_usual
                    else ceil((num_layers + ENDS) / (pp * stages)),
                )
                if pp == 1 or _can_run(candidate, num_layers):
                    yield candidate


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(max(1, most).bit_length())]


def _allows(planned: Planned, model: LanguageModel, dims: ParallelDims) -> bool:
    """Return whether the rules allow the degrees for this model, which is on the meta device."""
    candidate = Candidate(
        dims=dims, schedule="1F1B", stages=1, microbatch=1, num_microbatches=1, recompute="full"
    )
    try:
        check_model(candidate.apply(planned.config), spec=planned.layout.spec, model=model)
    except ConfigError:
        return False
    return True


def _can_run(candidate: Candidate, num_layers: int) -> bool:
    """Return whether the schedule can run with these numbers."""
    schedule, pp = SCHEDULES[candidate.schedule], candidate.dims.pp
    num_stages = candidate.stages * pp
    if num_stages > num_layers or (schedule.splits_backward and candidate.recompute != "none"):
        return False
    size = candidate.layers_per_stage
    if size is not None and ceil((num_layers + ENDS) / size) != num_stages:
        return False
    try:
        check_schedule(
            schedule.name,
            pp=pp,
            stages_per_rank=candidate.stages,
            num_microbatches=candidate.num_microbatches,
        )
    except ConfigError:
        return False
    return True
