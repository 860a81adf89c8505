"""The simulation of a pipeline's schedule, and the command `schedule`, which draws it.

A rank executes its actions in the order of the table. Each starts when the rank is free and its
input has arrived. This gives the start and end of each action, hence the bubble. Closed formulas
exist for each schedule, but only under its own assumptions; the simulation works for any table and
costs.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
USUAL: Mapping[Kind, int] = {
    "forward": 1,
    "backward": 2,
    "backward_input": 1,
    "backward_weight": 1,
}
"""Durations of one stage's work on one microbatch, as usual in papers."""
HELD: Mapping[Kind, int] = {
    "forward": 1,
    "backward": -1,
    "backward_input": 0,
    "backward_weight": -1,
}
"""Change of the number of activations that a rank holds, each of one stage and microbatch. An upper
bound, because the half for inputs frees a part."""


def peak_activations(table: Table, *, sizes: Sequence[int] | None = None) -> list[int]:
    """Return the most activations that each rank holds at once, with `sizes` of the stages."""
    sizes = sizes or [1] * sum(map(len, table))
    return [max(accumulate(HELD[a.kind] * sizes[a.stage] for a in row)) for row in table]


@dataclass(frozen=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of each rank. Time starts at 0."""

    rows: Sequence[Sequence[Span]]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for row in self.rows for span in row)

    @property
    def bubble(self) -> float:
        """Idle time of all ranks as a fraction of their computing."""
        busy = sum(span.end - span.start for row in self.rows for span in row)
        return self.makespan * len(self.rows) / busy - 1.0


def simulate(table: Table, *, costs: Mapping[Kind, float] = USUAL) -> Timeline:
    """Return the start and end of each action of a table.

    The inputs of an action on its own rank precede it in the table. The input from another stage is
    a forward's stream or a backward's gradient.
    """
    last_stage = max(action.stage for row in table for action in row)
    rows: list[list[Span]] = [[] for _ in table]
    ends: dict[tuple[int, bool, int], float] = {}
    """End by stage, whether it is a forward, and microbatch."""
    num_left = sum(map(len, table))
    while num_left:
        before = num_left
        for row, actions in zip(rows, table, strict=True):
            for action in actions[len(row) :]:
                is_forward, start = action.kind == "forward", row[-1].end if row else 0.0
                neighbor = action.stage + (-1 if is_forward else 1)
                if action.kind != "backward_weight" and 0 <= neighbor <= last_stage:
                    key = neighbor, is_forward, action.microbatch
                    if key not in ends:
                        break
                    start = max(start, ends[key])
                row.append(Span(action, start, start + costs[action.kind]))
                if action.kind != "backward_weight":
                    ends[action.stage, is_forward, action.microbatch] = row[-1].end
                num_left -= 1
        assert num_left < before, "deadlock; tables are checked when they are read"
    return Timeline(rows)


def plan_schedule(arguments: argparse.Namespace) -> str:
    """Return the timeline of a schedule and its bubble as text."""
    name, pp, num = arguments.schedule, arguments.pp, arguments.microbatches
    # compute_table refuses an unknown name
    usual = SCHEDULES[name].usual_stages if name in SCHEDULES else 1
    stages = arguments.stages or usual * pp
    if stages % pp:
        raise ConfigError(f"--stages must be a multiple of --pp, got {stages} and {pp}")
    timeline = simulate(
        compute_table(name, pp=pp, stages_per_rank=stages // pp, num_microbatches=num)
    )
    title = (
        f"{name}, {pp} ranks, {stages} stages, {num} microbatches: bubble {timeline.bubble:.2%} "
        f"(idle / computing), {timeline.makespan:.5g} times a forward of one stage"
    )
    drawn = draw(timeline, width=shutil.get_terminal_size((100, 24)).columns)
    return f"{title}\n\n{drawn}\n\n{LEGEND}\n"


def draw(timeline: Timeline, *, width: int) -> str:
    """Draw a timeline of integer durations, broken into lines of `width` characters.

    Time runs to the right, a row is a rank, and dots are the bubble.
    """
    widest = max(span.action.microbatch for row in timeline.rows for span in row)
    unit = 2 + len(str(widest))
    total = round(timeline.makespan) * unit
    lines = [_draw_row(row, unit=unit).ljust(total, ".") for row in timeline.rows]
    length = max(unit, width - len("rank 00 ")) // unit * unit
    return "\n\n".join(
        "\n".join(f"rank {n:<2} {line[start : start + length]}" for n, line in enumerate(lines))
        for start in range(0, total, length)
    )


def _draw_row(row: Sequence[Span], *, unit: int) -> str:
    """Return a row's text with `unit` characters for each unit of time."""
    letters = {kind: letter for letter, kind in KINDS.items()}
    first_stage = min(span.action.stage for span in row)
    text = ""
    for span in row:
        letter = letters[span.action.kind]
        if span.action.stage != first_stage:
            letter = letter.lower()
        length = round(span.end - span.start) * unit
        label = f"{letter}{span.action.microbatch}".ljust(length - 1, "-")
        text = text.ljust(round(span.start) * unit, ".") + f"{label} "
    return text
