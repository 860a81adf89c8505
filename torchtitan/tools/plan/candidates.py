"""Possible layouts of a job over a number of ranks, ranked by formulas.

There are hundreds, and each rehearsal takes seconds. So formulas rank all of them, and the best few
are rehearsed (`layout.py`). The constants come from a rehearsal of one sequence on one device, for
each way of recomputation: saved bytes and seconds, divided by the ranks that share them.

Candidates have powers of two for tp (within a machine), cp (down to 4096 tokens per rank), pp, ep
and copies of the model; microbatches of 1 to 8 samples; no, selective or full recomputation; and
the schedules 1F1B, Interleaved1F1B and ZBVZeroBubble. The samples of a step are constant: fewer
data-parallel ranks accumulate more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from torchtitan.base.errors import ConfigError
from torchtitan.job import Config
from torchtitan.mesh.dims import ParallelDims
from torchtitan.models.interface import GroupedExperts
from torchtitan.parallel.pipeline.schedules import SCHEDULES, check_schedule
from torchtitan.tools.plan.account import classify, replay
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.job import Planned, place
from torchtitan.tools.plan.links import Collective, axes_of
from torchtitan.tools.plan.rehearse import rehearse_step
from torchtitan.tools.plan.step import IN_TURN, time_step

Recompute = Literal["none", "2", "op", "full"]
RECOMPUTES: Sequence[Recompute] = ("none", "2", "op", "full")
Pipelining = Literal["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
PIPELINES: Sequence[Pipelining] = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
MODES: Mapping[Recompute, Literal["none", "selective", "full"]] = {
    "none": "none",
    "2": "selective",
    "op": "selective",
    "full": "full",
}
LEAST_SEQUENCE = 4096
"""Least number of tokens of a sequence per rank of cp."""
MICROBATCHES = (1, 2, 4, 8)
STATE, WEIGHT, GRADIENT = 12, 2, 4
"""Bytes per parameter: float32 weights and Adam's two states; as gathered; a float32 gradient."""
SIMPLER = 1.1
"""Required speedup per additional axis. The formulas ignore smaller products, more launches and
uneven stages."""
FRAGMENTED = 1.1
"""Reserved memory per live byte, roughly."""


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
        recomputation = replace(
            config.activation_checkpoint,
            mode=MODES[self.recompute],
            selective_ac_option="2" if self.recompute == "2" else "op",
        )
        local = size * num if is_staged else size
        training = replace(training, local_batch_size=local, global_batch_size=size * num * dims.dp)
        return replace(
            config,
            parallelism=parallelism,
            activation_checkpoint=recomputation,
            training=training,
        )

    def __str__(self) -> str:
        pipelined = f", {self.schedule}" if self.dims.pp > 1 else ""
        return (
            f"{self.dims}{pipelined}, {self.num_microbatches} x {self.microbatch} samples, "
            f"recompute {self.recompute}"
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Cost of the full model on one device for one sequence."""

    saved: float
    """Bytes that the forward of all blocks saves for backward."""
    working: float
    """Bytes of temporary tensors at the peak, such as those of a recomputed block."""
    seconds: float
    """Mean of best and worst, without communication."""
    in_experts: int
    """Parameters in experts."""
    num_chosen: int
    """Experts per token and layer, 0 without experts."""


def rank_candidates(
    planned: Planned, *, samples: int, measured: Mapping[Recompute, Measured]
) -> list[Candidate]:
    """Return the layouts that fit by the formulas, best first.

    Only the fastest one of each choice of pp, cp, tp and ep is kept. Fewer axes are preferred.

    Args:
        planned: The job in any layout.
        samples: Samples per step over all ranks.
        measured: Cost with each way of recomputation.
    """
    found = []
    for candidate in enumerate_layouts(planned, samples=samples):
        memory, seconds = estimate(planned, candidate, measured[candidate.recompute])
        if memory <= planned.device.memory:
            found.append(replace(candidate, seconds=seconds, memory=memory))
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in sorted(found, key=lambda candidate: candidate.seconds):
        dims = candidate.dims
        best.setdefault((dims.pp, dims.cp, dims.tp, dims.ep), candidate)
    return sorted(best.values(), key=lambda one: one.seconds * SIMPLER ** _num_axes(one.dims))


def _num_axes(dims: ParallelDims) -> int:
    """Return the number of axes other than data parallelism."""
    return sum(degree > 1 for degree in (dims.pp, dims.tp, dims.cp, dims.ep))


def measure(planned: Planned, recompute: Recompute) -> Measured:
    """Return the cost of one sequence on one device, from a rehearsal."""
    pair = Candidate(
        dims=ParallelDims(dp_shard=2),  # unsharded, a device would keep bfloat16 copies of weights
        schedule="1F1B",
        microbatch=1,
        num_microbatches=1,
        recompute=recompute,
    )
    job = place_again(planned, pair)
    short = job.shortened
    record = rehearse_step(short.config, layout=short.layout, rank=0)
    kinds = classify(record)
    saved = sum(
        entry.size
        for entry, kind in zip(record.entries, kinds, strict=True)
        if entry.what == "birth" and kind == "activations"
    )
    at_peak = replay(record).by_kind
    found = time_step(job, [record])
    in_turn = [found.resources[name] for name in IN_TURN]
    model = planned.layout.spec.build_meta(planned.layout.architecture)
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    return Measured(
        saved=saved,
        working=sum(at_peak.get(kind, 0) for kind in ("temporaries", "logits")),
        seconds=sum(map(sum, in_turn)) / 2,
        in_experts=sum(p.numel() for module in experts for p in module.parameters()),
        num_chosen=max((module.num_chosen for module in experts), default=0),
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
    facts = SCHEDULES[schedule]
    stages = 2 if facts.multi_stage else 1
    if pp * stages > num_layers or (facts.splits_backward and recompute != "none"):
        return False
    try:
        check_schedule(schedule, pp=pp, stages_per_rank=stages, num_microbatches=num_microbatches)
    except ConfigError:
        return False
    return True


def estimate(planned: Planned, candidate: Candidate, measured: Measured) -> tuple[float, float]:
    """Return the bytes of the fullest rank and the seconds of a step, by formulas."""
    dims, num, size = candidate.dims, candidate.num_microbatches, candidate.microbatch
    counts, architecture = planned.layout.counts, planned.layout.architecture
    in_experts = measured.in_experts
    stage = (
        counts.num_parameters - in_experts
    ) / dims.pp / dims.tp + in_experts / dims.pp / dims.ep
    inner = dims.fsdp * dims.tp * dims.pp
    is_staged = dims.pp > 1
    memory = STATE * counts.num_parameters / inner
    memory += GRADIENT * (stage if is_staged else counts.num_parameters / inner)
    ends = 2 * architecture.vocab_size * architecture.dim / dims.tp
    memory += WEIGHT * (stage if is_staged else ends + 3 * stage / architecture.num_layers)
    waiting = min(num, dims.pp * _in_flight(candidate.schedule, dims.pp)) if is_staged else 1
    shared = dims.tp * dims.cp
    memory += (measured.saved * waiting / dims.pp + measured.working) * size / shared

    axes = axes_of(dims, gpus_per_node=planned.gpus_per_node)

    def seconds(axis: str, what: Collective, bytes_: float) -> float:
        share = axes[axis].seconds(what, round(bytes_), device=planned.device)
        return (share.worst + share.best) / 2 if axes[axis].degree > 1 else 0.0

    stream = 2.0 * size * planned.config.training.seq_len / dims.cp * architecture.dim
    turns = 3 if candidate.recompute == "full" else 2
    waits = 4 * turns / 2 * seconds("tp", "all-gather", stream)
    waits += 3 * seconds("cp", "all-gather", stream * dims.cp / dims.tp)
    waits += 2 * turns * seconds("ep", "all-to-all", stream * measured.num_chosen / dims.tp)
    layers = architecture.num_layers / dims.pp
    one = measured.seconds * size / (dims.pp * dims.tp * dims.cp) + layers * waits
    computing = one * (num + _bubble(candidate.schedule, dims.pp))
    passes = 1 if is_staged else num
    gathers = 1 if is_staged else 2
    beside = passes * gathers * seconds("fsdp", "all-gather", WEIGHT * stage)
    beside += passes * seconds("fsdp", "reduce-scatter", GRADIENT * stage)
    beside += seconds("dp_replicate", "all-reduce", GRADIENT * stage / dims.fsdp)
    # best: the longer of the two; worst: their sum
    return FRAGMENTED * memory + ALLOWANCE, max(computing, beside) + min(computing, beside) / 2


def _in_flight(schedule: str, pp: int) -> float:
    """Return the most microbatches in flight on a rank, in shares of its layers, divided by pp."""
    return 1 + (pp - 1) / (2 * pp) if schedule == "Interleaved1F1B" else 1.0


def _bubble(schedule: str, pp: int) -> float:
    """Return the idle time of a rank, in times of a microbatch."""
    return (pp - 1) / {"1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 6}[schedule]
