"""From the settings to a pipeline's layout: stages, their ranks and the table of the schedule.

Every mistake is found here, on all ranks alike and before anything is built: a mistake that only
one rank meets would leave the others waiting for it.

How the layers are divided into the stages of a pipeline: arithmetic, no ranks and no tensors.

A pipeline is as fast as its slowest stage, so the costliest one must cost as little as possible. In
units of one layer, by the FLOPs of one token (`Counts`) with dim C, vocabulary V, sequence
S and L layers of H heads of width D, each with N weights in matrix products:

    layer     = 6 N + 12 H D S
    head      = 6 C V / layer
    embedding = 0, looking up costs nothing

A layer with experts costs what a token meets of it; where layers differ, one is their mean.

The layers stay in order, so a cut is a list of layer counts, and the best one is found exactly, by
dynamic programming over (stages, layers).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import ceil

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.base.log import plural
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.interface import Counts
from torchtitan.parallel.pipeline.schedules import (
    SCHEDULES,
    Table,
    compute_table,
    ranks_of,
    read_csv,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Which modules make up each stage, where each stage lies, and who does what when."""

    modules: Stages
    ranks: tuple[int, ...]
    """The rank of each stage, along the pipeline axis."""
    table: Table
    microbatch_size: int
    """Samples of a microbatch."""

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in their order."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    @property
    def losses_in_flight(self) -> int:
        """Most microbatches whose loss waits for the gradient of the last stage's weights."""
        last, waiting, most = len(self.modules) - 1, 0, 0
        for action in (action for row in self.table for action in row if action.stage == last):
            if action.kind == "forward":
                waiting += 1
            elif action.kind != "backward_input":
                waiting -= 1
            most = max(most, waiting)
        return most

    def __str__(self) -> str:
        return "; ".join(
            f"stage {stage} on rank {rank} of pp, {modules[0]} to {modules[-1]}"
            for stage, (rank, modules) in enumerate(zip(self.ranks, self.modules, strict=True))
        )


def plan_pipeline(
    settings: ParallelismConfig,
    *,
    num_layers: int,
    counts: Counts,
    training: TrainingConfig,
    frees_weights: bool,
    recomputes: bool,
    compiles: bool,
) -> PipelineLayout | None:
    """Lay the model out over the pipeline; None where its degree is 1.

    `frees_weights`: whether all gathered weights are freed after forward; `recomputes`: whether
    blocks are recomputed in backward; `compiles`: whether they are compiled.

    Raises:
        ConfigError: Layers, stages, microbatches and schedule do not fit together.
    """
    if settings.pipeline_parallel_degree == 1:
        return None
    size = settings.microbatch_size(training.local_batch_size)
    num_microbatches = training.local_batch_size // size
    if settings.pipeline_parallel_schedule_csv:
        table = read_table(settings, num_layers=num_layers, num_microbatches=num_microbatches)
    else:
        table = make_table(settings, num_layers=num_layers, num_microbatches=num_microbatches)
    check_halves(
        settings,
        table=table,
        frees_weights=frees_weights,
        recomputes=recomputes,
        compiles=compiles,
    )
    ranks = ranks_of(table)
    if settings.module_fqns_per_model_part:
        modules = check_modules(settings.module_fqns_per_model_part, num_layers=num_layers)
    else:
        costs = find_costs(settings, counts=counts, num_layers=num_layers, seq_len=training.seq_len)
        modules = name_modules(cut(num_layers, num_stages=len(ranks), costs=costs))
    layout = PipelineLayout(modules=modules, ranks=ranks, table=table, microbatch_size=size)
    logger.info("Pipeline of %s of %d: %s", plural(num_microbatches, "microbatch"), size, layout)
    return layout


def make_table(settings: ParallelismConfig, *, num_layers: int, num_microbatches: int) -> Table:
    """Return the table of the schedule that the settings name."""
    name, pp = settings.pipeline_parallel_schedule, settings.pipeline_parallel_degree
    facts = SCHEDULES[name]
    wanted = count_stages(
        settings,
        num_layers=num_layers,
        default=pp * (2 if facts.multi_stage else 1),
        fixed=facts.placement == "v" or not facts.multi_stage,
    )
    return compute_table(
        name, pp=pp, stages_per_rank=wanted // pp, num_microbatches=num_microbatches
    )


def read_table(settings: ParallelismConfig, *, num_layers: int, num_microbatches: int) -> Table:
    """Return the table of the schedule file."""
    path, pp = settings.pipeline_parallel_schedule_csv, settings.pipeline_parallel_degree
    table = read_csv(path)
    num_stages = len(ranks_of(table))
    wanted = count_stages(settings, num_layers=num_layers, default=num_stages, fixed=True)
    last = [
        a.microbatch
        for row in table
        for a in row
        if a.kind == "forward" and a.stage == num_stages - 1
    ]
    mistakes = []
    if len(table) != pp:
        mistakes.append(
            f"has a row for each of {len(table)} ranks, but pipeline_parallel_degree is {pp}; "
            f"set that to {len(table)}, or write {pp} rows"
        )
    if len(last) != num_microbatches:
        mistakes.append(
            f"has {len(last)} microbatches, but local_batch_size makes {num_microbatches}; set "
            f"pipeline_parallel_num_microbatches = {len(last)}"
        )
    if num_stages != wanted:
        mistakes.append(
            f"has {num_stages} stages, but the settings make {wanted}; remove layers_per_stage, or "
            f"list {num_stages} stages"
        )
    if last != sorted(last):
        mistakes.append(
            f"runs microbatches forward on the last stage in the order {last}; torch counts the "
            f"losses there from 0, so keep them in order"
        )
    if mistakes:
        raise ConfigError([f"{path}: {mistake}" for mistake in mistakes])
    return table


def check_halves(
    settings: ParallelismConfig,
    *,
    table: Table,
    frees_weights: bool,
    recomputes: bool,
    compiles: bool,
) -> None:
    """Refuse what does not work with a backward in two halves, for inputs and for weights.

    torch computes the gradients of weights with the parameters that are in place at that time;
    those of freed weights would be lost silently. And it requests them group by group, each time
    recomputing a checkpointed block: eleven forwards instead of two. The backward of a compiled
    block is one operator, which has no halves.

    Raises:
        ConfigError: The schedule has such halves, and weights are freed, blocks recomputed or
            compiled.
    """
    if not any(action.kind == "backward_weight" for row in table for action in row):
        return
    whole = ", ".join(name for name, facts in SCHEDULES.items() if not facts.splits_backward)
    schedule = settings.pipeline_parallel_schedule_csv or settings.pipeline_parallel_schedule
    why = "since it computes the gradients of inputs and weights apart"
    broken = {}
    if frees_weights:
        reshard = settings.fsdp_reshard_after_forward
        broken["parallelism.fsdp_reshard_after_forward"] = (
            f'"{reshard}" frees weights that {schedule} still needs, {why}; write "default" or '
            f'"never", or take one of {whole}'
        )
    if recomputes:
        broken["activation_checkpoint.mode"] = (
            f"{schedule} would recompute each block many times over, {why}; write mode = "
            f'"none", or take one of {whole}'
        )
    if compiles:
        broken["compile.enable"] = (
            f"{schedule} cuts the backward of a block in two, {why}, but that of a compiled "
            f"block is whole; write enable = false, or take one of {whole}"
        )
    if broken:
        tie = "parallelism.pipeline_parallel_schedule"
        raise ConfigError([Violation((key, tie), rule) for key, rule in broken.items()])


FIRST = ("tok_embeddings",)
LAST = ("norm", "output")
DEGREE = "parallelism.pipeline_parallel_degree"
ROUNDING = 1e-9
"""Of the sums of layers' costs."""
EXPLICIT = "parallelism.module_fqns_per_model_part"

Stages = tuple[tuple[str, ...], ...]
"""The modules of each stage, in their order: tok_embeddings, layers.0 ..., norm, output."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the ends of a model cost, in layers."""

    embedding: float
    head: float
    by_layer: tuple[float, ...] = ()
    """What each layer costs, of a mean one; none are given where all cost the same."""


def find_costs(
    settings: ParallelismConfig, *, counts: Counts, num_layers: int, seq_len: int
) -> Costs:
    """Return what embedding and head count for: what the settings say, or their FLOPs."""
    head = 6 * counts.num_head
    layer = (counts.flops_per_token(seq_len) - head) / num_layers
    first = settings.pipeline_parallel_first_stage_less_layers
    last = settings.pipeline_parallel_last_stage_less_layers
    for name, value in (("first", first), ("last", last)):
        if value is not None and value >= num_layers:
            raise ConfigError.at(
                f"parallelism.pipeline_parallel_{name}_stage_less_layers",
                f"must be fewer than the model's {num_layers} layers, got {value}; remove it to "
                f"count what the stage costs",
            )
    return Costs(
        embedding=0.0 if first is None else float(first),
        head=head / layer if last is None else float(last),
        by_layer=_compare_layers(counts.multiplied_by_layer, layer=layer),
    )


def _compare_layers(multiplied: Sequence[int], *, layer: float) -> tuple[float, ...]:
    """Return what each layer costs, of a mean one of `layer` FLOPs; nothing where all are equal."""
    if len(set(multiplied)) <= 1:
        return ()
    mean = sum(multiplied) / len(multiplied)
    return tuple(1 + 6 * (n - mean) / layer for n in multiplied)


def count_stages(settings: ParallelismConfig, *, num_layers: int, default: int, fixed: bool) -> int:
    """Return the number of stages: `default` where the settings give none.

    `fixed` says that the schedule takes no other, so that none is suggested.

    Raises:
        ConfigError: It is no multiple of the pipeline degree, or above the number of layers.
    """
    pp = settings.pipeline_parallel_degree
    lists, size = (
        settings.module_fqns_per_model_part,
        settings.pipeline_parallel_layers_per_stage,
    )
    if lists:
        num_stages = len(lists)
        if num_stages % pp:
            raise ConfigError.at(
                (EXPLICIT, DEGREE),
                f"must hold a multiple of pipeline_parallel_degree ({pp}) lists, one per stage, "
                f"got {num_stages}; make it {ceil(num_stages / pp) * pp}",
            )
    elif size is not None:
        ends = (settings.pipeline_parallel_first_stage_less_layers or 0) + (
            settings.pipeline_parallel_last_stage_less_layers or 0
        )
        num_stages = ceil((num_layers + ends) / size)
        if num_stages % pp:
            sizes = range(1, num_layers + ends + 1)
            counts = {n: ceil((num_layers + ends) / n) for n in sizes}
            suits = {default} if fixed else set(range(pp, num_layers + 1, pp))
            fits = [n for n, count in counts.items() if count in suits]
            raise ConfigError.at(
                ("parallelism.pipeline_parallel_layers_per_stage", DEGREE),
                f"must make a multiple of pipeline_parallel_degree ({pp}) stages, got {size}: "
                f"{num_stages} stages of {num_layers} layers"
                f"{f' and {ends} for the ends' if ends else ''}; "
                + (f"try {' or '.join(map(str, fits))}" if fits else "lower the degree"),
            )
    else:
        num_stages = default
    if num_stages > num_layers:
        raise ConfigError.at(
            DEGREE,
            f"must leave every stage at least one layer, got {num_stages} stages for a model of "
            f"{num_layers} layers; "
            + (
                f"lower pipeline_parallel_degree to at most {num_layers}"
                if pp > num_layers
                else f"lower pipeline_parallel_degree, or use a schedule or layers_per_stage with "
                f"at most {plural(num_layers // pp, 'stage')} per rank"
            ),
        )
    return num_stages


def cut(num_layers: int, *, num_stages: int, costs: Costs) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one.

    Of all cuts whose costliest stage costs least it is one with the least sum of squared costs: as
    even as it gets.
    """
    assert 1 <= num_stages <= num_layers

    begun = list(accumulate(costs.by_layer or [1.0] * num_layers, initial=0.0))

    def cost(stage: int, left: int, layers: int) -> float:
        ends = (costs.embedding if stage == 0 else 0.0) + (
            costs.head if stage == num_stages - 1 else 0.0
        )
        first = num_layers - left
        return begun[first + layers] - begun[first] + ends

    @cache
    def least(stage: int, left: int) -> float:
        """Return the cost of the costliest stage from `stage` on, with `left` layers to deal."""
        if stage == num_stages - 1:
            return cost(stage, left, left)
        return min(
            max(cost(stage, left, n), least(stage + 1, left - n)) for n in choices(stage, left)
        )

    def choices(stage: int, left: int) -> range:
        return range(1, left - (num_stages - 1 - stage) + 1)

    limit = least(0, num_layers)

    @cache
    def evenest(stage: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the least sum of squares within the limit, and its cut."""
        if stage == num_stages - 1:
            return cost(stage, left, left) ** 2, (left,)
        found = []
        for n in choices(stage, left):
            if max(cost(stage, left, n), least(stage + 1, left - n)) <= limit + ROUNDING:
                squares, rest = evenest(stage + 1, left - n)
                found.append((cost(stage, left, n) ** 2 + squares, (n, *rest)))
        return min(found)

    return evenest(0, num_layers)[1]


def name_modules(counts: Sequence[int]) -> Stages:
    """Return the modules of each stage from its number of layers."""
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(
        (
            *(FIRST if stage == 0 else ()),
            *(f"layers.{layer}" for layer in range(start, start + count)),
            *(LAST if stage == len(counts) - 1 else ()),
        )
        for stage, (start, count) in enumerate(zip(starts, counts, strict=True))
    )


def check_modules(stages: Sequence[Sequence[str]], *, num_layers: int) -> Stages:
    """Return the stages that the settings list."""
    layers = [f"layers.{layer}" for layer in range(num_layers)]
    wanted = [*FIRST, *layers, *LAST]
    named = [name for stage in stages for name in stage]
    unknown = sorted(set(named) - set(wanted))
    missing = [name for name in wanted if name not in named]
    twice = sorted({name for name in named if named.count(name) > 1})
    for what, names in (("unknown", unknown), ("missing", missing), ("named twice", twice)):
        if names:
            raise ConfigError.at(
                EXPLICIT,
                f"must name each module of the model once (tok_embeddings, layers.0 to "
                f"layers.{num_layers - 1}, norm, output), {what}: {', '.join(names[:8])}"
                + (" ..." if len(names) > 8 else ""),
            )
    if named != wanted:
        at = next(i for i, (a, b) in enumerate(zip(named, wanted, strict=True)) if a != b)
        raise ConfigError.at(
            EXPLICIT,
            f"must name the modules in their order, got {named[at]} where {wanted[at]} is due",
        )
    empty = [number for number, stage in enumerate(stages) if not set(stage) & set(layers)]
    if empty:
        raise ConfigError.at(
            EXPLICIT,
            f"must give every stage at least one layer, got none in list "
            f"{', '.join(str(number + 1) for number in empty)}; move a layer there",
        )
    return tuple(map(tuple, stages))
