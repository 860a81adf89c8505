"""Memory and time of a layout by formulas, which rank all candidates.

The constants come from rehearsals of one sequence on one device (`measure`): saved bytes and
seconds of the blocks and of the head, divided by the ranks that share them. Stages are those that
the trainer would choose, and the activations that a rank holds are those of its schedule's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache

from torchtitan.mesh.dims import ParallelDims
from torchtitan.models.interface import GroupedExperts
from torchtitan.parallel.pipeline.layout import find_costs, split_layers
from torchtitan.parallel.pipeline.schedules import Kind, compute_table, ranks_of
from torchtitan.tools.plan.account import classify, replay
from torchtitan.tools.plan.candidates import (
    Candidate,
    Recompute,
    enumerate_layouts,
    place_again,
)
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.links import Collective, axes_of
from torchtitan.tools.plan.ranks import rehearse_rank
from torchtitan.tools.plan.step import EXPOSED, RankTimes

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
class Measured:
    """Cost of the full model on one device for one sequence."""

    saved: float
    """Bytes that the forward of all blocks saves for backward."""
    working: float
    """Bytes of temporary tensors at the peak, such as those of a recomputed block."""
    in_blocks: float
    """Seconds of all blocks, mean of best and worst, without communication."""
    in_ends: float
    """Seconds of embedding, head and loss."""
    parameters: Mapping[str, int]
    """Parameters of all "blocks", and the part of them in "experts"."""
    num_chosen: int
    """Experts per token and layer, 0 without experts."""


def measure(planned: Planned, recompute: Recompute) -> Measured:
    """Return the cost of one sequence on one device, from a rehearsal."""
    pair = Candidate(
        dims=ParallelDims(dp_shard=2),  # unsharded, a device would keep bfloat16 copies of weights
        schedule="1F1B",
        microbatch=1,
        num_microbatches=1,
        recompute=recompute,
        stages=1,
    )
    job = place_again(planned, pair)
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
    return Measured(
        saved=saved,
        working=sum(at_peak.get(name, 0) for name in ("temporaries", "logits")),
        in_blocks=blocks,
        in_ends=ends,
        parameters={
            "blocks": sum(p.numel() for p in layers.parameters()),
            "experts": sum(p.numel() for module in experts for p in module.parameters()),
        },
        num_chosen=max((module.num_chosen for module in experts), default=0),
    )


def between(none: Measured, full: Measured, *, share: float) -> Measured:
    """Return the cost if a share of the blocks is recomputed."""
    return replace(
        none,
        saved=none.saved + share * (full.saved - none.saved),
        in_blocks=none.in_blocks + share * (full.in_blocks - none.in_blocks),
    )


def rank_candidates(
    planned: Planned, *, samples: int, measured: Mapping[Recompute, Measured]
) -> list[Candidate]:
    """Return the layouts that fit by the formulas, best first.

    Only the fastest one of each choice of pp, cp, tp and ep is kept. Fewer axes are preferred.

    `planned` is the job in any layout, `samples` those of a step over all ranks, `measured` the
    cost with each way of recomputation.
    """
    candidates = []
    for candidate in enumerate_layouts(planned, samples=samples):
        memory, seconds = estimate(planned, candidate, measured[candidate.recompute])
        if memory <= planned.device.memory:
            candidates.append(replace(candidate, seconds=seconds, memory=memory))
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.seconds):
        dims = candidate.dims
        best.setdefault((dims.pp, dims.cp, dims.tp, dims.ep), candidate)
    return sorted(
        best.values(),
        key=lambda plan: plan.seconds * SIMPLER ** _num_axes(plan.dims),
    )


def _num_axes(dims: ParallelDims) -> int:
    """Return the number of axes other than data parallelism."""
    return sum(degree > 1 for degree in (dims.pp, dims.tp, dims.cp, dims.ep))


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """The part of a pipeline rank."""

    layers: int
    held: float
    """Most activations that it holds at once, each of one layer and microbatch."""
    has_embedding: bool
    has_head: bool

    def __lt__(self, rank: _Rank) -> bool:
        """Return whether it has no more of anything, and less of something."""
        pairs = zip(astuple(self), astuple(rank), strict=True)
        return self != rank and all(own <= theirs for own, theirs in pairs)


_split = cache(split_layers)


@cache
def _pipeline_ranks(
    schedule: str, pp: int, stages_per_rank: int, num: int, layers: Sequence[int]
) -> Sequence[_Rank]:
    """Return the parts of the ranks, with `num` microbatches and the `layers` of each stage.

    Ranks that have no more of anything than another one are left out.
    """
    table = compute_table(schedule, pp=pp, stages_per_rank=stages_per_rank, num_microbatches=num)
    holders = ranks_of(table)
    ranks: list[_Rank] = []
    for number, row in enumerate(table):
        held = most = 0.0
        for action in row:
            held += HELD[action.kind] * layers[action.stage]
            most = max(most, held)
        ranks.append(
            _Rank(
                layers=sum(n for n, rank in zip(layers, holders, strict=True) if rank == number),
                held=most,
                has_embedding=holders[0] == number,
                has_head=holders[-1] == number,
            )
        )
    return [rank for rank in {*ranks} if not any(rank < better for better in ranks)]


def _ranks(planned: Planned, candidate: Candidate) -> Sequence[_Rank]:
    num_layers = planned.layout.architecture.num_layers
    if candidate.dims.pp == 1:
        return [_Rank(layers=num_layers, held=num_layers, has_embedding=True, has_head=True)]
    pp, stages = candidate.dims.pp, candidate.stages
    costs = find_costs(
        candidate.apply(planned.config).parallelism,
        counts=planned.layout.counts,
        num_layers=num_layers,
        seq_len=planned.config.training.seq_len,
    )
    layers = _split(num_layers, num_stages=pp * stages, costs=costs)
    num = min(candidate.num_microbatches, 2 * pp)  # more hold no more
    return _pipeline_ranks(candidate.schedule, pp, stages, num, layers)


def estimate(planned: Planned, candidate: Candidate, measured: Measured) -> tuple[float, float]:
    """Return the bytes of the fullest rank and the seconds of a step, by formulas."""
    ranks = _ranks(planned, candidate)
    memory = max(_memory(planned, candidate, measured, rank) for rank in ranks)
    return FRAGMENTED * memory + ALLOWANCE, _seconds(planned, candidate, measured, ranks)


def _parameters(planned: Planned, measured: Measured, rank: _Rank) -> tuple[float, float, float]:
    """Return a stage's dense parameters in blocks, those in experts, and those outside of blocks,
    unsharded."""
    blocks, experts = measured.parameters["blocks"], measured.parameters["experts"]
    share = rank.layers / planned.layout.architecture.num_layers
    ends = (planned.layout.counts.num_parameters - blocks) / 2
    return share * (blocks - experts), share * experts, ends * (rank.has_embedding + rank.has_head)


def _memory(planned: Planned, candidate: Candidate, measured: Measured, rank: _Rank) -> float:
    """Return the live bytes of a pipeline rank at its peak."""
    dims, num_layers = candidate.dims, planned.layout.architecture.num_layers
    dense, experts, ends = _parameters(planned, measured, rank)
    sharded = (dense + experts + ends) / (dims.fsdp * dims.tp)
    gathered = (dense + ends) / dims.tp + experts / dims.ep
    memory = STATE * sharded
    if dims.pp > 1:
        memory += (WEIGHT + GRADIENT) * gathered
    else:
        block = (dense / dims.tp + experts / dims.ep) / num_layers
        memory += GRADIENT * sharded + WEIGHT * (ends / dims.tp + 3 * block)
    of_layer = measured.saved / num_layers / dims.tp
    if candidate.recompute not in ("op", "full"):  # tp saves two gathered streams
        of_layer += 2 * (1 - 1 / dims.tp) * _stream(planned)
    activations = rank.held * of_layer + measured.working / dims.tp
    return memory + activations * candidate.microbatch / dims.cp


def _stream(planned: Planned) -> float:
    """Return the bytes of one sequence between two blocks."""
    return 2.0 * planned.config.training.seq_len * planned.layout.architecture.dim


def _seconds(
    planned: Planned, candidate: Candidate, measured: Measured, ranks: Sequence[_Rank]
) -> float:
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
    of_layer = measured.in_blocks / planned.layout.architecture.num_layers
    shared = dims.tp * dims.cp
    slowest = max(
        rank.layers * (of_layer * size / shared + waits)
        + rank.has_head * measured.in_ends * size / shared
        for rank in ranks
    )
    computing = slowest * (num + _bubble(candidate))
    is_staged = dims.pp > 1
    passes = 1 if is_staged else num
    gathers = 1 if is_staged else 2
    dense, experts, ends = max(_parameters(planned, measured, rank) for rank in ranks)
    stage = (dense + ends) / dims.tp + experts / dims.ep
    beside = passes * gathers * seconds("fsdp", "all-gather", WEIGHT * stage)
    beside += passes * seconds("fsdp", "reduce-scatter", GRADIENT * stage)
    beside += seconds("dp_replicate", "all-reduce", GRADIENT * stage / dims.fsdp)
    # best: the longer of the two; worst: a part of the shorter one more
    return max(computing, beside) + EXPOSED / 2 * min(computing, beside)


def _bubble(candidate: Candidate) -> float:
    """Return the idle time of a rank, in times of a microbatch."""
    parts = 6 if candidate.schedule == "ZBVZeroBubble" else candidate.stages
    return (candidate.dims.pp - 1) / parts
