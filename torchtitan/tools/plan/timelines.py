"""The command `schedule`: a pipeline schedule as a drawing, with its bubble and activations.

It needs no model. The table of the schedule is simulated with a cost for each kind of action.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace

from torchtitan.base.errors import ConfigError
from torchtitan.parallel.pipeline.schedules import SCHEDULES, Table, compute_table
from torchtitan.tools.plan.draw import LEGEND, as_text, save_timeline
from torchtitan.tools.plan.schedule import Costs, Timeline, simulate

UNIT = "times a forward of one stage"
COSTS = ("forward", "backward_input", "backward_weight")


def draw_schedule(arguments: argparse.Namespace) -> str:
    """Return a timeline and its figures as text, and draw it to `arguments.out` if set."""
    table, title = _table(arguments)
    timeline = simulate(table, costs=_costs(arguments))
    peak = max(timeline.peak_in_shares(rank) for rank in range(len(timeline.rows)))
    headline = f"{title}: bubble {timeline.total_bubble:.1%}, peak activations {peak:g}"
    # the shortest action has one slot
    shortest = min(span.end - span.start for row in timeline.rows for span in row)
    num_slots = min(2000, round(timeline.makespan / shortest))
    width = shutil.get_terminal_size((100, 24)).columns
    drawn = as_text(timeline, num_slots=num_slots, width=width)
    text = "\n\n".join([headline, drawn, _figures(timeline), LEGEND]) + "\n"
    if arguments.out is not None:
        unit = f"time, in {UNIT}"
        save_timeline(arguments.out, timeline, title=headline, unit=unit, num_slots=num_slots)
        text += f"\nwritten: {arguments.out}\n"
    return text


def _costs(arguments: argparse.Namespace) -> Costs:
    values = {
        name: getattr(arguments, name)
        for name in (*COSTS, "transfer")
        if getattr(arguments, name) is not None
    }
    mistakes = [
        f"--{name} must be a finite number above 0, got {value:g}"
        for name, value in values.items()
        if not (0.0 < value < float("inf") or (name == "transfer" and value == 0.0))
    ]
    if mistakes:
        raise ConfigError(mistakes)
    halves = Costs(**values)
    return replace(halves, backward=halves.backward_input + halves.backward_weight)


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
