"""The cost of a pipeline schedule, and the command `schedule`, which draws it.

The table of the schedule is simulated with a duration for each kind of action. A rank executes its
actions in the order of the table. Each starts when the rank is free and its inputs have arrived.
This gives the start and end of each action, hence the bubble and the held activations. Closed
formulas exist for each schedule, but only under its own assumptions; the simulation works for any
table, costs and number of microbatches.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtitan.base.errors import ConfigError
from torchtitan.parallel.pipeline.schedules import (
    KINDS,
    SCHEDULES,
    Action,
    Kind,
    Table,
    compute_table,
)

LEGEND = (
    "F forward, B backward, I and W its halves for inputs and weights, then the microbatch;\n"
    "small letters: a later stage of the rank; dots: idle"
)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Duration of one stage's work on one microbatch, in any unit.

    As usual in papers, each half of backward costs the same as forward by default.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """Delay from one rank to another. No rank is busy during it."""

    def of(self, action_name: Kind) -> float:
        """Return the duration of one action."""
        by_kind: Mapping[Kind, float] = {
            "forward": self.forward,
            "backward": self.backward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }
        return by_kind[action_name]


@dataclass(frozen=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The actions of each rank, simulated or measured. Time starts at 0."""

    rows: Sequence[Sequence[Span]]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for row in self.rows for span in row)

    def busy(self, rank: int) -> float:
        """Return a rank's computing time."""
        return sum(span.end - span.start for span in self.rows[rank])

    def bubble(self, rank: int) -> float:
        """Return a rank's idle time as a fraction of its computing."""
        return self.makespan / self.busy(rank) - 1.0

    @property
    def total_bubble(self) -> float:
        """Idle time of all ranks as a fraction of their computing."""
        busy = sum(self.busy(rank) for rank in range(len(self.rows)))
        return self.makespan * len(self.rows) / busy - 1.0

    def num_stages_of(self, rank: int) -> int:
        """Return the number of stages of a rank."""
        return len({span.action.stage for span in self.rows[rank]})

    def peak(self, rank: int) -> int:
        """Return the most activations held at once, each of one stage and microbatch.

        An activation is held from the start of its forward to the end of its backward, with the
        half for weights. That is an upper bound, because the half for inputs frees a part.
        """
        held = most = 0
        for span in sorted(self.rows[rank], key=lambda span: span.start):
            held += span.action.kind == "forward"
            most = max(most, held)
            held -= span.action.kind in ("backward", "backward_weight")
        return most

    def peak_in_shares(self, rank: int) -> float:
        """Return `peak` divided by the stages of a rank, to compare schedules."""
        return self.peak(rank) / self.num_stages_of(rank)


def simulate(table: Table, *, costs: Costs) -> Timeline:
    """Return the start and end of each action of a table."""
    rank_of = {action.stage: rank for rank, row in enumerate(table) for action in row}
    rows: list[list[Span]] = [[] for _ in table]
    ends: dict[Action, float] = {}
    for rank, action, needs in execution_order(table):
        start = rows[rank][-1].end if rows[rank] else 0.0
        for need in needs:
            is_local = rank_of[need.stage] == rank
            start = max(start, ends[need] + (0.0 if is_local else costs.transfer))
        ends[action] = start + costs.of(action.kind)
        rows[rank].append(Span(action, start, ends[action]))
    assert len(ends) == sum(map(len, table)), "deadlock; tables are checked when they are read"
    return Timeline(rows=rows)


def execution_order(table: Table) -> Iterator[tuple[int, Action, list[Action]]]:
    """Yield rank, action and the actions that it depends on, each action after its dependencies.

    The iterator ends early if the ranks deadlock.
    """
    num_stages = 1 + max(action.stage for row in table for action in row)
    num_done = [0] * len(table)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            for action in row[num_done[rank] :]:
                needs = [
                    next((choice for choice in either if choice in done), None)
                    for either in _requirements(action, num_stages=num_stages)
                ]
                met = [need for need in needs if need is not None]
                if len(met) < len(needs):
                    break
                done.add(action)
                num_done[rank] += 1
                moved = True
                yield rank, action, met


def _requirements(action: Action, *, num_stages: int) -> list[tuple[Action, ...]]:
    """Return the dependencies of `action`, each as alternatives. One of them is in the table."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "forward":
        return [(Action(stage - 1, "forward", microbatch),)] if stage else []
    if action.kind == "backward_weight":
        return [(Action(stage, "backward_input", microbatch),)]
    needs: list[tuple[Action, ...]] = [(Action(stage, "forward", microbatch),)]
    if stage + 1 < num_stages:
        kinds: tuple[Kind, ...] = ("backward", "backward_input")
        needs.append(tuple(Action(stage + 1, action_name, microbatch) for action_name in kinds))
    return needs


def plan_schedule(arguments: argparse.Namespace) -> str:
    """Return the timeline of a schedule, its bubble and its activations as text."""
    table, title = _table(arguments)
    timeline = simulate(table, costs=_costs(arguments))
    peaks = [timeline.peak_in_shares(rank) for rank in range(len(timeline.rows))]
    # the shortest action has one slot
    shortest = min(span.end - span.start for row in timeline.rows for span in row)
    num_slots = min(2000, round(timeline.makespan / shortest))
    width = shutil.get_terminal_size((100, 24)).columns
    parts = [
        f"{title}: bubble {timeline.total_bubble:.2%} (idle / computing), "
        f"{timeline.makespan:.5g} times a forward of one stage",
        "peak activations, in microbatches of all layers of a rank: "
        + " ".join(f"{peak:g}" for peak in peaks),
        draw(timeline, num_slots=num_slots, width=width),
        LEGEND,
    ]
    return "\n\n".join(parts) + "\n"


def _costs(arguments: argparse.Namespace) -> Costs:
    names = ("forward", "backward_input", "backward_weight", "transfer")
    values = {name: getattr(arguments, name) for name in names}
    for name, value in values.items():
        if not (0.0 < value < float("inf") or (name == "transfer" and value == 0.0)):
            raise ConfigError(f"--{name} must be a finite number above 0, got {value:g}")
    return Costs(**values, backward=values["backward_input"] + values["backward_weight"])


def _table(arguments: argparse.Namespace) -> tuple[Table, str]:
    """Return the table to draw, and its title."""
    name, pp, num = arguments.schedule, arguments.pp, arguments.microbatches
    if name is None or pp is None or num is None:
        raise ConfigError("--schedule, --pp and --microbatches must be set")
    # compute_table refuses an unknown name
    usual = SCHEDULES[name].usual_stages if name in SCHEDULES else 1
    stages = usual * pp if arguments.stages is None else arguments.stages
    if pp < 1 or stages < 1 or stages % pp:
        raise ConfigError(f"--stages must be a multiple of --pp, got {stages} and {pp}")
    table = compute_table(name, pp=pp, stages_per_rank=stages // pp, num_microbatches=num)
    return table, f"{name}, {pp} ranks, {stages} stages, {num} microbatches"


def draw(timeline: Timeline, *, num_slots: int, width: int) -> str:
    """Draw the timeline in `num_slots` slots, broken into lines of `width` characters.

    Time runs to the right, a row is a rank, and dots are the bubble.
    """
    widest = max(span.action.microbatch for row in timeline.rows for span in row)
    per_slot = 2 + len(str(widest))
    per_time = num_slots * per_slot / timeline.makespan
    lines = [_draw_row(row, per_time=per_time) for row in timeline.rows]
    length = max(per_slot, width - len("rank 00 ")) // per_slot * per_slot
    total = max(len(line) for line in lines)
    blocks = [
        "\n".join(
            f"rank {rank:<2} {line.ljust(total, '.')[start : start + length]}"
            for rank, line in enumerate(lines)
        )
        for start in range(0, total, length)
    ]
    return "\n\n".join(blocks)


def _draw_row(row: Sequence[Span], *, per_time: float) -> str:
    text = ""
    first_stage = min(span.action.stage for span in row)
    for span in row:
        begin, end = round(span.start * per_time), round(span.end * per_time)
        text = text.ljust(begin, ".")
        text += _label(span.action, first_stage).ljust(end - begin - 1, "-")[: end - len(text) - 1]
        text = text.ljust(end)
    return text


def _label(action: Action, first_stage: int) -> str:
    letter = next(letter for letter, name in KINDS.items() if name == action.kind)
    return f"{letter if action.stage == first_stage else letter.lower()}{action.microbatch}"
