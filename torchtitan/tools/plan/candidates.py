"""Layouts that a job could have on so many ranks, and roughly what each would need.

There are hundreds, and to rehearse one takes seconds. So they are ranked by formulas first, and the
best few are rehearsed (`layout.py`): a formula need only put the good ones in front. Its constants
are not written by hand: blocks are rehearsed once on one device, for each way of recomputation, and
what a block saves and how long it computes is divided by the ranks that share it.

What is tried: powers of two for tp (within a machine), cp (down to 4096 tokens a rank), pp and ep,
copies of a model that is sharded within some machines, microbatches of 1 to 8 samples, blocks
recomputed not at all, every second, by operator or whole, and 1F1B, Interleaved1F1B and
ZBVZeroBubble. The samples of a step stay as they are: they are dealt out to more or fewer ranks,
and accumulated.
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
"""Tokens of a sequence that a rank of cp should have at least."""
MICROBATCHES = (1, 2, 4, 8)
STATE, WEIGHT, GRADIENT = 12, 2, 4
"""Bytes per parameter: float32 weights and Adam's two states; as gathered; a float32 gradient."""
SIMPLER = 1.1
"""How much quicker a layout with one more axis must be by the formulas, which know nothing of
smaller products, more launches and uneven stages."""
FRAGMENTED = 1.1
"""What torch's allocator reserves for a byte that lives, about."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout, and what the formulas say of it."""

    dims: ParallelDims
    schedule: Pipelining
    microbatch: int
    """Samples."""
    num_microbatches: int
    """Of a rank in a step."""
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
            pipeline_parallel_num_microbatches=None,
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
    """What the whole model needs on one device for one sequence."""

    saved: float
    """Bytes that the forward of all blocks leaves to backward."""
    working: float
    """Bytes of what is at work at the peak: a block that is recomputed, gradients on their way."""
    seconds: float
    """Of products, attention and passes, between best and worst."""
    in_experts: int
    """Parameters."""
    num_chosen: int
    """Experts of a token, of one layer; 0: there are none."""


def rank_candidates(
    planned: Planned, *, samples: int, measured: Mapping[Recompute, Measured]
) -> list[Candidate]:
    """Return the layouts that fit by the formulas, the best first: of each choice of pp, cp, tp
    and ep the quickest, and of choices that are about as quick the one with fewer axes.

    `planned`: the job in any layout; `samples`: of a step over all ranks; `measured`: for each way
    to recompute.
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
    """Count the axes beside sharding; copies cost nothing to understand."""
    return sum(degree > 1 for degree in (dims.pp, dims.tp, dims.cp, dims.ep))


def measure(planned: Planned, recompute: Recompute) -> Measured:
    """Rehearse one sequence on one device."""
    pair = Candidate(
        dims=ParallelDims(dp_shard=2),  # one device alone would keep copies of weights beside them
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
    at_peak = replay(record, expandable=True).by_kind
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
        all_ranks=False,
    )


def enumerate_layouts(planned: Planned, *, samples: int) -> Iterator[Candidate]:
    """Yield what could be tried; the rules of the model are checked for tp and ep alone."""
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
    """Tell whether the model can be split so."""
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
    """Tell whether a pipeline can run so."""
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
    # at best the longer of the two, at worst both
    return FRAGMENTED * memory + ALLOWANCE, max(computing, beside) + min(computing, beside) / 2


def _in_flight(schedule: str, pp: int) -> float:
    """Return the most microbatches that wait on a rank, in shares of all its layers, over pp."""
    return 1 + (pp - 1) / (2 * pp) if schedule == "Interleaved1F1B" else 1.0


def _bubble(schedule: str, pp: int) -> float:
    """Return the idle time of a rank, in microbatches of its own."""
    return (pp - 1) / {"1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 6}[schedule]
