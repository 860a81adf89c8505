"""Possible layouts of a job over a number of ranks, shortlisted by formulas.

There are hundreds, and each rehearsal takes seconds to minutes. So formulas rank all of them, and
the best few are rehearsed (`layout.py`).

Candidates have powers of two for tp (within a machine), cp (down to 4096 tokens per rank), pp, ep
and copies of the model; microbatches of 1 to 8 samples; recomputation of no or all blocks, or by
operator; and the schedules 1F1B, Interleaved1F1B and ZBVZeroBubble. Stages that the job sets are
replaced. The samples of a step are constant: fewer data-parallel ranks accumulate more.

The constants of the formulas come from rehearsals of one sequence on two devices (`measure`): saved
bytes and seconds of the blocks and of the head, divided by the ranks that share them. The
activations that a rank holds follow from its schedule's table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, product
from math import ceil
from typing import Literal

from torchtitan.base.errors import ConfigError
from torchtitan.job import Config
from torchtitan.layout import check_model
from torchtitan.mesh.dims import ParallelDims
from torchtitan.models.interface import GroupedExperts, LanguageModel
from torchtitan.parallel.pipeline.schedules import SCHEDULES, Kind, check_schedule, compute_table
from torchtitan.tools.plan.account import classify, replay
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.job import Planned, plan_config
from torchtitan.tools.plan.ranks import rehearse_rank
from torchtitan.tools.plan.step import EXPOSED, RankTimes
from torchtitan.tools.plan.traffic import Collective, axes_of

Recompute = Literal["none", "op", "full"]
RECOMPUTES: Sequence[Recompute] = ("none", "op", "full")
Pipelining = Literal["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
PIPELINES: Sequence[Pipelining] = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
MIN_SEQUENCE = 4096
"""Least number of tokens of a sequence per rank of cp."""
MICROBATCHES = (1, 2, 4, 8)
STATE, WEIGHT, GRADIENT = 12, 2, 4
"""Bytes per parameter: float32 weights and Adam's two states; as gathered; a float32 gradient."""
SIMPLER = 1.1
"""Required speedup per additional axis. The formulas ignore smaller products and more launches."""
FRAGMENTED = 1.1
"""Reserved memory per live byte, roughly."""
HELD: Mapping[Kind, float] = {
    "forward": 1.0,
    "backward": -1.0,
    "backward_input": 0.75,
    "backward_weight": -1.75,
}
"""Change of the activations that a rank holds. Between the halves of a backward it also holds the
gradients of the factors, three quarters of the activations in rehearsals of Llama 3."""


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

    @property
    def stages(self) -> int:
        """Stages per rank."""
        return SCHEDULES[self.schedule].usual_stages if self.dims.pp > 1 else 1

    def place(self, planned: Planned) -> Planned:
        """Return the job in this layout; raise ConfigError if the rules do not allow it."""
        return plan_config(
            self.apply(planned.config),
            world_size=self.dims.world_size,
            device=planned.device,
            gpus_per_node=planned.gpus_per_node,
        )

    def apply(self, config: Config) -> Config:
        """Return the settings of a job in this layout."""
        dims, num, size = self.dims, self.num_microbatches, self.microbatch
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
            pipeline_parallel_layers_per_stage=None,
            module_fqns_per_model_part=(),
        )
        recompute = replace(
            config.activation_checkpoint,
            mode="selective" if self.recompute == "op" else self.recompute,
            selective_ac_option="op",
        )
        training = replace(
            config.training,
            local_batch_size=size * num if is_staged else size,
            global_batch_size=size * num * dims.dp,
        )
        return replace(
            config, parallelism=parallelism, activation_checkpoint=recompute, training=training
        )

    def __str__(self) -> str:
        schedule = f", {self.schedule}" if self.dims.pp > 1 else ""
        return (
            f"{self.dims}{schedule}, {self.num_microbatches} x {self.microbatch} samples, "
            f"recompute {self.recompute}"
        )


def enumerate_layouts(planned: Planned, *, samples: int) -> Iterator[Candidate]:
    """Yield all candidates. The model's rules are checked for tp and ep only."""
    world, within = planned.world_size, min(planned.gpus_per_node, planned.world_size)
    num_layers = planned.layout.architecture.num_layers
    model = planned.layout.spec.build_meta(planned.layout.architecture)
    tps = [tp for tp in _powers(within) if _allows(planned, model, ParallelDims(tp=tp))]
    eps = [1]
    if planned.layout.counts.num_experts:
        eps = [n for n in _powers(world) if _allows(planned, model, ParallelDims(dp_shard=n, ep=n))]
    cps = _powers(min(planned.config.training.seq_len // MIN_SEQUENCE, world))
    for tp, cp, pp in product(tps, cps, _powers(min(num_layers, world))):
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
            for schedule, recompute in product(PIPELINES if pp > 1 else PIPELINES[:1], RECOMPUTES):
                candidate = Candidate(
                    dims=dims,
                    schedule=schedule,
                    microbatch=size,
                    num_microbatches=samples // (dp * size),
                    recompute=recompute,
                )
                if pp == 1 or _can_run(candidate, num_layers):
                    yield candidate


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(max(1, most).bit_length())]


def _single(dims: ParallelDims, recompute: Recompute) -> Candidate:
    """Return a candidate with one microbatch of one sequence."""
    return Candidate(
        dims=dims, schedule="1F1B", microbatch=1, num_microbatches=1, recompute=recompute
    )


def _allows(planned: Planned, model: LanguageModel, dims: ParallelDims) -> bool:
    """Return whether the rules allow the degrees for this model, which is on the meta device."""
    config = _single(dims, "full").apply(planned.config)
    try:
        check_model(config, spec=planned.layout.spec, model=model)
    except ConfigError:
        return False
    return True


def _can_run(candidate: Candidate, num_layers: int) -> bool:
    """Return whether the schedule can run with these numbers."""
    schedule, pp, stages = SCHEDULES[candidate.schedule], candidate.dims.pp, candidate.stages
    if stages * pp > num_layers or (schedule.splits_backward and candidate.recompute != "none"):
        return False
    num = candidate.num_microbatches
    try:
        check_schedule(schedule.name, pp=pp, stages_per_rank=stages, num_microbatches=num)
    except ConfigError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Cost of the full model on one device for one sequence."""

    saved: float
    """Bytes that the forward of all blocks saves for backward."""
    working: float
    """Bytes of temporary tensors at the peak, such as the tensors of a recomputed block."""
    in_blocks: float
    """Seconds of all blocks, mean of best and worst, without communication."""
    in_ends: float
    """Seconds of embedding, head and loss."""
    dense: int
    """Parameters of all blocks outside of experts."""
    experts: int
    """Parameters of experts."""
    num_chosen: int
    """Experts per token and layer, 0 without experts."""


def measure(planned: Planned, recompute: Recompute) -> Measured:
    """Return the cost of one sequence, from a rehearsal.

    There are two devices because an unsharded model would keep bfloat16 copies of weights.
    """
    job = _single(ParallelDims(dp_shard=2), recompute).place(planned)
    record = rehearse_rank(job, 0, title=f"recompute {recompute}, 2 devices", validates=False)
    saved = sum(
        entry.size
        for entry, purpose in zip(record.entries, classify(record), strict=True)
        if entry.event == "birth" and purpose == "activations"
    )
    at_peak, times = replay(record).by_purpose, RankTimes(record, job)
    blocks, ends = (
        sum(times.in_turn(bound, *phases) for bound in (0, 1)) / 2
        for phases in (("forward", "backward"), ("between",))
    )
    layers = planned.layout.spec.build_meta(planned.layout.architecture).layers
    experts = [module for module in layers.modules() if isinstance(module, GroupedExperts)]
    num_in_experts = sum(p.numel() for module in experts for p in module.parameters())
    return Measured(
        saved=saved,
        working=sum(at_peak.get(name, 0) for name in ("temporaries", "logits")),
        in_blocks=blocks,
        in_ends=ends,
        dense=sum(p.numel() for p in layers.parameters()) - num_in_experts,
        experts=num_in_experts,
        num_chosen=max((module.num_chosen for module in experts), default=0),
    )


def rank_candidates(
    planned: Planned, *, samples: int, measured: Mapping[Recompute, Measured]
) -> list[Candidate]:
    """Return the layouts that fit by the formulas, best first.

    Only the fastest one of each choice of pp, cp, tp and ep is kept. Fewer axes are preferred.

    `planned` is the job in any layout, `samples` the number of samples of a step over all
    ranks, `measured` the cost with each way of recomputation.
    """
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in enumerate_layouts(planned, samples=samples):
        memory, seconds = estimate(planned, candidate, measured[candidate.recompute])
        dims = candidate.dims
        key = (dims.pp, dims.cp, dims.tp, dims.ep)
        if memory <= planned.device.memory and (key not in best or seconds < best[key].seconds):
            best[key] = replace(candidate, seconds=seconds, memory=memory)
    return [
        best[key]
        for key in sorted(
            best,
            key=lambda key: best[key].seconds * SIMPLER ** sum(degree > 1 for degree in key),
        )
    ]


def estimate(planned: Planned, candidate: Candidate, measured: Measured) -> tuple[float, float]:
    """Return the bytes of the fullest rank and the seconds of a step, by formulas."""
    dims = candidate.dims
    held = [1.0]
    if dims.pp > 1:
        num = min(candidate.num_microbatches, 2 * dims.pp)  # more hold no more
        held = _held(candidate.schedule, dims.pp, num)
    # the first rank has the embedding, the last one the head; in a V the first one has both
    has_both = dims.pp == 1 or SCHEDULES[candidate.schedule].placement == "v"
    memory = max(
        _memory(planned, candidate, measured, held=held[0], ends=1.0 if has_both else 0.5),
        _memory(planned, candidate, measured, held=max(held[1:], default=0), ends=0),
        _memory(planned, candidate, measured, held=held[-1], ends=0 if has_both else 0.5),
    )
    return FRAGMENTED * memory + ALLOWANCE, _seconds(planned, candidate, measured)


@cache
def _held(schedule: str, pp: int, num: int) -> list[float]:
    """Return the most microbatches that each rank holds at once, in all of its layers."""
    stages = SCHEDULES[schedule].usual_stages
    table = compute_table(schedule, pp=pp, stages_per_rank=stages, num_microbatches=num)
    return [max(accumulate(HELD[action.kind] for action in row)) / stages for row in table]


def _num_layers(planned: Planned, candidate: Candidate) -> int:
    """Return the layers of the largest rank."""
    num_stages = candidate.dims.pp * candidate.stages
    return ceil(planned.layout.architecture.num_layers / num_stages) * candidate.stages


def _parameters(
    planned: Planned, candidate: Candidate, measured: Measured, *, ends: float
) -> tuple[float, float]:
    """Return a rank's unsharded parameters outside and inside of experts, with a share of the
    parameters outside of blocks (`ends`)."""
    share = _num_layers(planned, candidate) / planned.layout.architecture.num_layers
    outside = planned.layout.counts.num_parameters - measured.dense - measured.experts
    return share * measured.dense + ends * outside, share * measured.experts


def _memory(
    planned: Planned, candidate: Candidate, measured: Measured, *, held: float, ends: float
) -> float:
    """Return the live bytes of a pipeline rank at its peak."""
    dims, num_layers = candidate.dims, _num_layers(planned, candidate)
    dense, experts = _parameters(planned, candidate, measured, ends=ends)
    sharded = (dense + experts) / (dims.fsdp * dims.tp)
    memory = STATE * sharded
    if dims.pp > 1:
        memory += (WEIGHT + GRADIENT) * (dense / dims.tp + experts / dims.ep)
    else:  # the ends and three blocks are gathered at once
        blocks = 3 * (measured.dense / dims.tp + measured.experts / dims.ep) / num_layers
        outside = dense - measured.dense
        memory += GRADIENT * sharded + WEIGHT * (outside / dims.tp + blocks)
    of_layer = measured.saved / planned.layout.architecture.num_layers / dims.tp
    if candidate.recompute == "none":  # tp saves two gathered streams
        of_layer += 2 * (1 - 1 / dims.tp) * _stream(planned)
    activations = held * num_layers * of_layer + measured.working / dims.tp
    return memory + activations * candidate.microbatch / dims.cp


def _stream(planned: Planned) -> float:
    """Return the bytes of one sequence between two blocks."""
    return 2.0 * planned.config.training.seq_len * planned.layout.architecture.dim


def _seconds(planned: Planned, candidate: Candidate, measured: Measured) -> float:
    dims, num, size = candidate.dims, candidate.num_microbatches, candidate.microbatch
    axes = axes_of(dims, gpus_per_node=planned.gpus_per_node)

    def seconds(axis: str, operation: Collective, bytes_: float) -> float:
        share = axes[axis].seconds(operation, round(bytes_), device=planned.device)
        return (share.worst + share.best) / 2 if axes[axis].degree > 1 else 0.0

    stream = _stream(planned) * size / dims.cp
    turns = 3 if candidate.recompute == "full" else 2
    waits = 4 * turns / 2 * seconds("tp", "all-gather", stream)
    waits += 3 * seconds("cp", "all-gather", stream * dims.cp / dims.tp)
    waits += 2 * turns * seconds("ep", "all-to-all", stream * measured.num_chosen / dims.tp)
    share = size / (dims.tp * dims.cp)
    all_layers, layers = planned.layout.architecture.num_layers, _num_layers(planned, candidate)
    of_layer = measured.in_blocks / all_layers * share + waits
    # stages are divided by cost, so that the head's rank has fewer layers
    slowest = max(layers * of_layer, (all_layers * of_layer + measured.in_ends * share) / dims.pp)
    parts = 6 if candidate.schedule == "ZBVZeroBubble" else candidate.stages
    computing = slowest * (num + (dims.pp - 1) / parts)
    is_staged = dims.pp > 1
    passes = 1 if is_staged else num
    gathers = 1 if is_staged else 2
    dense, experts = _parameters(planned, candidate, measured, ends=0.5 if is_staged else 1)
    stage = dense / dims.tp + experts / dims.ep
    beside = passes * gathers * seconds("fsdp", "all-gather", WEIGHT * stage)
    beside += passes * seconds("fsdp", "reduce-scatter", GRADIENT * stage)
    beside += seconds("dp_replicate", "all-reduce", GRADIENT * stage / dims.fsdp)
    # best: the longer of the two; worst: a part of the shorter one more
    return max(computing, beside) + EXPOSED / 2 * min(computing, beside)
