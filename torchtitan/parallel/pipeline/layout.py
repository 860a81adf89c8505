"""From the settings to a pipeline's layout: stages, their ranks and the table of the schedule.

Every mistake is found here, on all ranks alike and before anything is built: a mistake that only
one rank meets would leave the others waiting for it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.base.log import amount
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.contract import Counts
from torchtitan.parallel.pipeline.schedule_csv import read_csv
from torchtitan.parallel.pipeline.schedules import SCHEDULES, Table, compute_table, ranks_of
from torchtitan.parallel.pipeline.stages import (
    Stages,
    check_modules,
    count_stages,
    cut,
    find_costs,
    name_modules,
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
    logger.info("Pipeline of %s of %d: %s", amount(num_microbatches, "microbatch"), size, layout)
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
