"""Pipeline schedules: which rank computes what, and in which order, from torch's own tables.

A schedule class of torch decides the order when it is built, from three numbers: ranks, stages a
rank and microbatches. Here it is built around a stand-in stage, so the table is at hand without
ranks or a model. The runtime executes the same table; nothing is copied from it by hand.
This is the one file that imports `torch.distributed.pipelining`, whose internals move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from torchtitan.base.errors import ConfigError

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
# the letters of torch's tables and CSV files
KINDS: Mapping[str, Kind] = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}


@dataclass(frozen=True, order=True)
class Action:
    """One stage's work on one microbatch; `backward` is that of inputs and weights together."""

    stage: int
    kind: Kind
    microbatch: int


Table = list[list[Action]]
"""A row for each rank, in the order in which the rank works."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What holds of one schedule; what torch's class can tell is asked of it."""

    name: str
    microbatch_per_stage: bool = False
    """It needs at least as many microbatches as there are stages."""
    in_rounds: bool = False
    """Microbatches come in equal rounds, of as many as there are ranks or a few more."""

    @property
    def multi_stage(self) -> bool:
        """Whether a rank may hold several stages."""
        return not issubclass(get_schedule_class(self.name), PipelineScheduleSingle)

    @cached_property
    def placement(self) -> Literal["loop", "v"]:
        """Whether stages go round the ranks again and again, or there and back."""
        first_rank = {action.stage for action in self._small[0]}
        return "v" if 3 in first_rank else "loop"

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are computed apart."""
        return any(action.kind == "backward_input" for row in self._small for action in row)

    @cached_property
    def _small(self) -> Table:
        return _torch_table(self, pp=2, stages_per_rank=2 if self.multi_stage else 1, num=4)


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="GPipe"),
        Schedule(name="1F1B", microbatch_per_stage=True),
        Schedule(name="Interleaved1F1B", in_rounds=True),
        Schedule(name="LoopedBFS"),
        Schedule(name="InterleavedZeroBubble", in_rounds=True),
        Schedule(name="ZBVZeroBubble"),
        Schedule(name="DualPipeV", microbatch_per_stage=True),
    )
}


def check_schedule(schedule: str, *, pp: int, stages_per_rank: int, num_microbatches: int) -> None:
    """Refuse what the schedule cannot run, with what would work.

    Raises:
        ConfigError: naming every mistake.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"a pipeline schedule is one of {', '.join(SCHEDULES)}; got {schedule!r}")
    facts = SCHEDULES[schedule]
    mistakes = [
        f"{what} must be at least 1, got {number}"
        for what, number in (
            ("pipeline ranks", pp),
            ("stages a rank", stages_per_rank),
            ("microbatches", num_microbatches),
        )
        if number < 1
    ]
    if mistakes:
        raise ConfigError(mistakes)
    needed = 1 if not facts.multi_stage else 2 if facts.placement == "v" else stages_per_rank
    if stages_per_rank != needed:
        mistakes.append(
            f"{schedule} puts exactly {needed} stage{'s' * (needed > 1)} on a rank, got "
            f"{stages_per_rank}; for {pp} rank{'s' * (pp > 1)} make {needed * pp} in all"
        )
    num_stages = pp * needed
    if facts.microbatch_per_stage and num_microbatches < num_stages:
        mistakes.append(
            f"{schedule} needs at least as many microbatches as stages: {num_stages} for {pp} "
            f"ranks of {needed}, got {num_microbatches}; use more microbatches or fewer ranks"
        )
    rounds = max(1, num_microbatches // pp)
    if facts.in_rounds and num_microbatches % rounds:
        fits = [n for n in range(1, 2 * num_microbatches + 1) if n % max(1, n // pp) == 0]
        below = max(n for n in fits if n < num_microbatches)
        above = min(n for n in fits if n > num_microbatches)
        mistakes.append(
            f"{schedule} runs microbatches in equal rounds: {num_microbatches} do not divide by "
            f"{rounds} rounds ({num_microbatches} // {pp} ranks); try {below} or {above}"
        )
    if mistakes:
        raise ConfigError(mistakes)


def compute_table(schedule: str, *, pp: int, stages_per_rank: int, num_microbatches: int) -> Table:
    """Return what each rank computes, in order, as torch's schedule class decides it.

    A pair that DualPipeV marks as overlapped appears as its two parts, in the order in which
    torch's runtime executes them.
    """
    check_schedule(
        schedule, pp=pp, stages_per_rank=stages_per_rank, num_microbatches=num_microbatches
    )
    return _torch_table(
        SCHEDULES[schedule], pp=pp, stages_per_rank=stages_per_rank, num=num_microbatches
    )


def place_stages(schedule: str, *, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank that holds each stage, in the order of the stages."""
    num_stages = pp * stages_per_rank
    check_schedule(  # a number of microbatches that suits every schedule
        schedule, pp=pp, stages_per_rank=stages_per_rank, num_microbatches=num_stages
    )
    if SCHEDULES[schedule].placement == "loop":
        return tuple(stage % pp for stage in range(num_stages))
    return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))


def _torch_table(schedule: Schedule, *, pp: int, stages_per_rank: int, num: int) -> Table:
    # what the constructors of torch's schedules read of a stage, and nothing else
    stage: Any = SimpleNamespace(
        group_rank=0, group_size=pp, num_stages=pp * stages_per_rank, submod=None
    )
    stages = [stage] * stages_per_rank if schedule.multi_stage else stage
    order = get_schedule_class(schedule.name)(stages, num).pipeline_order
    rows = [_unwrap(order[rank]) for rank in range(pp)]
    return rows if schedule.multi_stage else [_number_forwards(row) for row in rows]


def _unwrap(actions: Sequence[Any]) -> list[Action]:
    """Keep the computing of a row of torch's: no gaps, no reductions, no overlapping pairs."""
    parts = [part for action in actions if action for part in action.sub_actions or (action,)]
    return [
        Action(part.stage_index, KINDS[part.computation_type.value], part.microbatch_index)
        for part in parts
        if part.computation_type.value in KINDS
    ]


def _number_forwards(row: list[Action]) -> list[Action]:
    """Count a single stage's forwards from 0: torch's 1F1B table starts the last rank at 1."""
    numbers = iter(range(len(row)))
    return [
        Action(action.stage, "forward", next(numbers)) if action.kind == "forward" else action
        for action in row
    ]
