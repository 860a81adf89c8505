"""The command `schedule`: a pipeline schedule as a drawing, with its bubble and activations.

It needs no model. The table of the schedule is simulated with a cost for each kind of action.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, replace

from torchtitan.base.errors import ConfigError
from torchtitan.parallel.pipeline.schedules import SCHEDULES, Table, compute_table, read_csv
from torchtitan.tools.plan.draw import LEGEND, as_text, save_picture
from torchtitan.tools.plan.schedule import Costs, Timeline, simulate

UNIT = "times a forward of one stage"
COSTS = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Panel:
    """A timeline and its name."""

    name: str
    timeline: Timeline

    @property
    def headline(self) -> str:
        """Name, bubble and peak in one line."""
        peaks = [self.timeline.peak_in_shares(rank) for rank in range(len(self.timeline.rows))]
        return (
            f"{self.name}: bubble {self.timeline.total_bubble:.1%}, peak activations {max(peaks):g}"
        )


def draw_schedule(arguments: argparse.Namespace) -> str:
    """Return a timeline and its figures as text, and draw it to `arguments.out` if set."""
    table, title = _table(arguments)
    panel = Panel(title, simulate(table, costs=_costs(arguments)))
    num_slots = _num_slots(panel.timeline)
    width = shutil.get_terminal_size((100, 24)).columns
    drawn = as_text(panel.timeline, num_slots=num_slots, width=width)
    text = "\n\n".join([panel.headline, drawn, _figures(panel.timeline), LEGEND]) + "\n"
    if arguments.out is not None:
        axis = f"time, in {UNIT}"
        save_picture(
            arguments.out, panels=[(panel.headline, axis, panel.timeline)], num_slots=num_slots
        )
        text += f"\nwritten: {arguments.out}\n"
    return text


def _costs(arguments: argparse.Namespace) -> Costs:
    given = {
        name: getattr(arguments, name)
        for name in (*COSTS, "transfer")
        if getattr(arguments, name) is not None
    }
    mistakes = [
        f"--{name} must be a finite number above 0, got {value:g}"
        for name, value in given.items()
        if not (0.0 < value < float("inf") or (name == "transfer" and value == 0.0))
    ]
    if mistakes:
        raise ConfigError(mistakes)
    halves = Costs(**given)
    return replace(halves, backward=halves.backward_input + halves.backward_weight)


def _table(arguments: argparse.Namespace) -> tuple[Table, str]:
    """Return the table to draw, and its title."""
    if arguments.csv is not None:
        asked = [arguments.schedule, arguments.pp, arguments.stages, arguments.microbatches]
        if any(value is not None for value in asked):
            raise ConfigError(
                "--csv sets ranks, stages and microbatches; remove --schedule, --pp, --stages and "
                "--microbatches"
            )
        return read_csv(arguments.csv), arguments.csv.name
    name, pp, stages, microbatches = (
        arguments.schedule,
        arguments.pp,
        arguments.stages,
        arguments.microbatches,
    )
    missing = [
        option
        for option, value in (
            ("--schedule", name),
            ("--microbatches", microbatches),
            ("--stages (or --pp)", stages if pp is None else pp),
        )
        if value is None
    ]
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set, or --csv FILE")
    if pp is not None and pp < 1:
        raise ConfigError(f"--pp must be at least 1, got {pp}")
    # compute_table refuses an unknown name
    usual = 2 if name in SCHEDULES and SCHEDULES[name].multi_stage else 1
    stages = usual * pp if stages is None else stages
    step = usual if pp is None else pp
    if stages < 1 or stages % step:
        raise ConfigError(
            f"--stages must be a multiple of {step} "
            f"({'the usual stages per rank' if pp is None else '--pp'}), got {stages}; "
            f"try {max(1, stages // step) * step}"
        )
    pp = stages // usual if pp is None else pp
    table = compute_table(name, pp=pp, stages_per_rank=stages // pp, num_microbatches=microbatches)
    return table, f"{name}, {pp} ranks, {stages} stages, {microbatches} microbatches"


def _num_slots(timeline: Timeline) -> int:
    """Return the number of slots such that the shortest action has one."""
    shortest = min(span.end - span.start for row in timeline.rows for span in row)
    return min(2000, round(timeline.makespan / shortest))


def _figures(timeline: Timeline) -> str:
    """Return a line per rank, and one for the pipeline."""
    lines = ["rank  computes     idle   bubble  peak activations: of a stage  of a rank's layers"]
    for rank in range(len(timeline.rows)):
        busy, bubble = timeline.busy(rank), timeline.bubble(rank)
        lines.append(
            f"{rank:>4}  {busy:>8.5g} {timeline.makespan - busy:>8.5g} {bubble:>8.2%}"
            f"{timeline.peak(rank):>28}  {timeline.peak_in_shares(rank):>18g}"
        )
    lines.append(
        f"in all {timeline.makespan:.5g} {UNIT}; bubble {timeline.total_bubble:.2%} (idle / "
        "computes)"
    )
    return "\n".join(lines)
