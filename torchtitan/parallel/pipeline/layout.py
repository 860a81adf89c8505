"""The layout of a pipeline, from the settings: stages, their ranks, and the table of the schedule.

All mistakes are found here, on every rank and before anything is built. If only one rank found a
mistake, the other ranks would wait for it.

Dividing the layers into stages is arithmetic, without ranks and tensors. A pipeline is as fast as
its slowest stage, so the cost of the most expensive stage is minimized. In units of one layer, by
the FLOPs per token (`Counts`), with dim C, vocabulary V, sequence S and L layers of H heads of
width D that each have N weights in matrix products:

    layer     = 6 N + 12 H D S
    head      = 6 C V / layer
    embedding = 0, because a lookup costs nothing

A layer with experts costs the products of the experts that a token is sent to. If layers differ,
the unit is their mean.

Layers stay in order, so a cut is a list of layer counts. The best one is found exactly, by dynamic
programming over (stages, layers). If there are more stages than layers, the first stage may have
only the embedding, and the last one only norm and head.

`pipeline_parallel_layers_per_stage` sets the number of stages as in torchtitan 0.2: embedding and
head count as layers (1 each if not given).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, zip_longest
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
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """The modules and the rank of each stage, and the schedule."""

    modules: Stages
    ranks: tuple[int, ...]
    """Rank of each stage on the pp axis."""
    table: Table
    microbatch_size: int
    """Samples per microbatch."""

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    @property
    def losses_in_flight(self) -> int:
        """Most microbatches of the last stage between their forward and their weight gradient."""
        last, waiting, most = len(self.modules) - 1, 0, 0
        for action in (action for row in self.table for action in row if action.stage == last):
            if action.kind == "forward":
                waiting += 1
            elif action.kind != "backward_input":
                waiting -= 1
            most = max(most, waiting)
        return most

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed separately."""
        return any(action.kind == "backward_weight" for row in self.table for action in row)

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
    recomputation: str,
    compiles: bool,
) -> PipelineLayout:
    """Plan the layout of a pipeline of two ranks or more.

    `frees_weights` says whether all gathered weights are freed after forward. Raises ConfigError if
    layers, stages, microbatches and schedule do not fit together.
    """
    schedule, pp = settings.pipeline_parallel_schedule, settings.pipeline_parallel_degree
    size = settings.pipeline_parallel_microbatch_size
    num_microbatches = training.local_batch_size // size
    usual = pp * SCHEDULES[schedule].usual_stages
    num_stages = count_stages(settings, num_layers=num_layers, default=usual)
    table = compute_table(
        schedule, pp=pp, stages_per_rank=num_stages // pp, num_microbatches=num_microbatches
    )
    ranks = ranks_of(table)
    if settings.module_fqns_per_model_part:
        modules = check_modules(settings.module_fqns_per_model_part, num_layers=num_layers)
    else:
        costs = find_costs(settings, counts=counts, num_layers=num_layers, seq_len=training.seq_len)
        modules = name_modules(split_layers(num_layers, num_stages=len(ranks), costs=costs))
    layout = PipelineLayout(modules=modules, ranks=ranks, table=table, microbatch_size=size)
    if layout.splits_backward:
        check_split_backward(
            settings, frees_weights=frees_weights, recomputation=recomputation, compiles=compiles
        )
    logger.info("Pipeline of %s of %d: %s", plural(num_microbatches, "microbatch"), size, layout)
    return layout


def check_split_backward(
    settings: ParallelismConfig, *, frees_weights: bool, recomputation: str, compiles: bool
) -> None:
    """Check a schedule that computes the gradients of inputs and of weights separately.

    torch computes the gradients of weights for the parameters that exist at that time, so the
    gradients of freed weights would be lost silently. It requests them group by group, and each
    time recomputes a checkpointed block: eleven forwards instead of two. So `selective`, which is
    the default, recomputes nothing here. The backward of a compiled block is one operator and
    cannot be split. Raises ConfigError if weights are freed, or all blocks are recomputed, or
    compiled.
    """
    schedule = settings.pipeline_parallel_schedule
    reshard = settings.fsdp_reshard_after_forward
    rules = {
        "parallelism.fsdp_reshard_after_forward": frees_weights
        and f'must be "default" or "never", got "{reshard}"',
        "activation_checkpoint.mode": recomputation in ("full", "memory_budget")
        and f'must be "none" or "selective", which recomputes nothing here, got "{recomputation}"',
        "compile.enable": compiles and "must be false",
    }
    why = f"{schedule} computes gradients of inputs and weights separately"
    schedule_key = "parallelism.pipeline_parallel_schedule"
    broken = [
        Violation((key, schedule_key), f"{rule}: {why}") for key, rule in rules.items() if rule
    ]
    if broken:
        raise ConfigError(broken)


FIRST = ("tok_embeddings",)
LAST = ("norm", "output")
DEGREE = "parallelism.pipeline_parallel_degree"
ROUNDING = 1e-9
"""Tolerance when sums of layers' costs are compared."""
EXPLICIT = "parallelism.module_fqns_per_model_part"
LAYERS_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"

Stages = tuple[tuple[str, ...], ...]
"""The modules of each stage, in order: tok_embeddings, layers.0 ..., norm, output."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of the parts of a model, in units of a mean layer."""

    embedding: float
    head: float
    by_layer: tuple[float, ...] = ()
    """Cost of each layer. Empty: all layers are equal."""


def find_costs(
    settings: ParallelismConfig, *, counts: Counts, num_layers: int, seq_len: int
) -> Costs:
    """Return the costs of embedding, head and layers, from the settings or from their FLOPs; raise
    ConfigError if an end is set to cost as much as all layers."""
    head, counts = 6 * counts.num_head, replace(counts, num_frozen=0)
    layer = (counts.flops_per_token(seq_len) - head) / num_layers
    first = settings.pipeline_parallel_first_stage_less_layers
    last = settings.pipeline_parallel_last_stage_less_layers
    for name, value in (("first", first), ("last", last)):
        if value is not None and value >= num_layers:
            raise ConfigError.at(
                f"parallelism.pipeline_parallel_{name}_stage_less_layers",
                f"must be fewer than the model's {num_layers} layers, got {value}",
            )
    multiplied, by_layer = counts.multiplied_by_layer, tuple[float, ...]()
    if len(set(multiplied)) > 1:
        mean = sum(multiplied) / len(multiplied)
        by_layer = tuple(1 + 6 * (n - mean) / layer for n in multiplied)
    return Costs(
        embedding=0.0 if first is None else float(first),
        head=head / layer if last is None else float(last),
        by_layer=by_layer,
    )


def count_stages(settings: ParallelismConfig, *, num_layers: int, default: int) -> int:
    """Return the number of stages.

    `default` holds if the settings do not determine it. Raises ConfigError if it is not a multiple
    of the pipeline degree, or above the number of parts that can be a stage: the layers, the
    embedding, and norm with output.
    """
    pp = settings.pipeline_parallel_degree
    size = settings.pipeline_parallel_layers_per_stage
    if settings.module_fqns_per_model_part:
        num_stages = len(settings.module_fqns_per_model_part)
        if num_stages % pp:
            raise ConfigError.at(
                (EXPLICIT, DEGREE),
                f"must hold a multiple of pipeline_parallel_degree ({pp}) lists, one per stage, "
                f"got {num_stages}",
            )
    elif size is not None:
        first, last = end_weights(settings)
        num_stages = ceil((num_layers + first + last) / size)
        if num_stages % pp:
            raise ConfigError.at(
                (LAYERS_PER_STAGE, DEGREE),
                f"must make a multiple of pipeline_parallel_degree ({pp}) stages, got {size}: "
                f"{num_stages} stages of {num_layers} layers, {first} for the embedding and {last} "
                f"for the head",
            )
    else:
        num_stages, most = default, num_layers + 2
        if num_stages > most:
            raise ConfigError.at(
                DEGREE,
                f"must make at most {most} stages of {num_layers} layers, the embedding, and norm "
                f"with output, got {num_stages}; lower it to at most "
                f"{most // max(1, default // pp)}",
            )
    return num_stages


def end_weights(settings: ParallelismConfig) -> tuple[int, int]:
    """Return how many layers embedding and head count as under layers_per_stage."""
    first = settings.pipeline_parallel_first_stage_less_layers
    last = settings.pipeline_parallel_last_stage_less_layers
    return 1 if first is None else first, 1 if last is None else last


def split_layers(num_layers: int, *, num_stages: int, costs: Costs) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    The cost of the most expensive stage is minimal. Among such cuts the sum of squared costs is
    minimal, so that the stages are as even as possible. Each stage has at least one layer; if there
    are more stages than layers, the first and the last stage may have none.
    """
    assert 1 <= num_stages <= num_layers + 2
    fewest = [1] * num_stages
    if num_stages > num_layers:
        fewest[0] = fewest[-1] = 0

    cost_before = list(accumulate(costs.by_layer or [1.0] * num_layers, initial=0.0))

    def cost(stage: int, left: int, layers: int) -> float:
        ends = (costs.embedding if stage == 0 else 0.0) + (
            costs.head if stage == num_stages - 1 else 0.0
        )
        first = num_layers - left
        return cost_before[first + layers] - cost_before[first] + ends

    @cache
    def least(stage: int, left: int) -> float:
        """Return the cost of the most expensive stage from `stage` on, for `left` layers."""
        if stage == num_stages - 1:
            return cost(stage, left, left)
        return min(
            max(cost(stage, left, n), least(stage + 1, left - n)) for n in choices(stage, left)
        )

    def choices(stage: int, left: int) -> range:
        return range(fewest[stage], left - sum(fewest[stage + 1 :]) + 1)

    limit = least(0, num_layers)

    @cache
    def evenest(stage: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return the smallest sum of squares within the limit, and its cut."""
        if stage == num_stages - 1:
            return cost(stage, left, left) ** 2, (left,)
        candidates = []
        for n in choices(stage, left):
            if max(cost(stage, left, n), least(stage + 1, left - n)) <= limit + ROUNDING:
                squares, sizes = evenest(stage + 1, left - n)
                candidates.append((cost(stage, left, n) ** 2 + squares, (n, *sizes)))
        return min(candidates)

    return evenest(0, num_layers)[1]


def name_modules(counts: Sequence[int]) -> Stages:
    """Return the modules of each stage from the numbers of layers."""
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
    """Check the lists of modules in the settings, and return them as stages; raise ConfigError if a
    module is unknown, missing, repeated or misplaced, or a list is empty."""
    wanted = [*FIRST, *(f"layers.{layer}" for layer in range(num_layers)), *LAST]
    modules = [name for stage in stages for name in stage]
    pairs = zip_longest(modules, wanted, fillvalue="nothing")
    wrong = [f"{module} instead of {due}" for module, due in pairs if module != due]
    if not all(stages):
        wrong.append("an empty list")
    elif not {*LAST} <= {*stages[-1]}:
        wrong.append(f"{stages[-1]} as the last list")
    if wrong:
        raise ConfigError.at(
            EXPLICIT,
            f"must name tok_embeddings, layers.0 to layers.{num_layers - 1}, norm and output in "
            f"order, with norm and output in the last list and no list empty, got {wrong[0]}",
        )
    return tuple(map(tuple, stages))
