"""Plan before you pay: `python -m torchtitan.plan schedule --schedule 1F1B --stages 4 ...`.

Needs no process group, no GPU and no model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.parallel.schedule_csv import read_csv
from torchtitan.parallel.schedules import SCHEDULES, Table, compute_table
from torchtitan.plan.draw import LEGEND, as_text, save_picture
from torchtitan.plan.schedule import Costs, Timeline, simulate


def main(argv: Sequence[str]) -> int:
    """Draw what is asked for and return 0, or print one line for each mistake and return 2."""
    arguments = _parser().parse_args(argv)
    try:
        sys.stdout.write(draw_schedule(arguments))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torchtitan.plan", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    schedule = commands.add_parser(
        "schedule", help="draw a pipeline schedule and tell its bubble and its activations"
    )
    schedule.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    schedule.add_argument("--pp", type=int, help="pipeline ranks, where --stages leave it open")
    schedule.add_argument("--stages", type=int, help="stages in all, over all ranks")
    schedule.add_argument("--microbatches", type=int, help="microbatches of a step")
    schedule.add_argument("--csv", type=Path, metavar="FILE", help="read the schedule from a file")
    schedule.add_argument("--out", type=Path, metavar="FILE", help="also write an .svg or .png")
    for name in ("forward", "backward_input", "backward_weight"):
        schedule.add_argument(f"--{name}", type=float, default=1.0, help="its relative cost")
    schedule.add_argument("--transfer", type=float, default=0.0, help="cost of going to a rank")
    return parser


def draw_schedule(arguments: argparse.Namespace) -> str:
    """Return the timeline and its figures as text, and write the picture if one is asked for."""
    table, title = _table(arguments)
    timeline = simulate(table, costs=_costs(arguments))
    num_slots = _num_slots(timeline)
    title = f"{title}: {_summary(timeline)}"
    text = f"{title}\n\n{_text(timeline, num_slots=num_slots)}\n\n{LEGEND}\n\n{figures(timeline)}"
    if arguments.out is not None:
        panels = [(title, "time, in forwards of one stage", timeline)]
        save_picture(arguments.out, panels=panels, num_slots=num_slots)
        text += f"\nwritten: {arguments.out}\n"
    return text


def _costs(arguments: argparse.Namespace) -> Costs:
    given = {
        name: getattr(arguments, name)
        for name in ("forward", "backward_input", "backward_weight", "transfer")
    }
    mistakes = [
        f"--{name} must be a finite number above 0, got {value}"
        for name, value in given.items()
        if not (0.0 < value < float("inf") or (name == "transfer" and value == 0.0))
    ]
    if mistakes:
        raise ConfigError(mistakes)
    return Costs(**given, backward=given["backward_input"] + given["backward_weight"])


def _table(arguments: argparse.Namespace) -> tuple[Table, str]:
    """Return the table to draw and what to call it."""
    if arguments.csv is not None:
        asked = [arguments.schedule, arguments.pp, arguments.stages, arguments.microbatches]
        if any(value is not None for value in asked):
            raise ConfigError(
                "--csv tells ranks, stages and microbatches itself; leave out --schedule, --pp, "
                "--stages and --microbatches"
            )
        return read_csv(arguments.csv), arguments.csv.name
    name, pp, stages, microbatches = (
        arguments.schedule,
        arguments.pp,
        arguments.stages,
        arguments.microbatches,
    )
    if name is None or microbatches is None or (pp is None and stages is None):
        raise ConfigError(
            "--schedule, --microbatches and --stages (or --pp) are needed, or --csv FILE"
        )
    # an unknown name is refused by compute_table, in the same words as anywhere
    usual = 2 if name in SCHEDULES and SCHEDULES[name].multi_stage else 1
    stages = usual * pp if stages is None else stages
    pp = stages // usual if pp is None else pp
    if pp < 1 or stages % pp or (arguments.pp is None and stages != usual * pp):
        raise ConfigError(
            f"--stages must be a multiple of the ranks{'' if arguments.pp else f', {usual} each'}"
            f": got {stages} stages{f' for {pp} ranks' if arguments.pp else ''}; "
            f"try {max(1, stages // max(1, pp)) * max(1, pp)}"
        )
    table = compute_table(name, pp=pp, stages_per_rank=stages // pp, num_microbatches=microbatches)
    return table, f"{name}, {pp} ranks, {stages} stages, {microbatches} microbatches"


def _num_slots(timeline: Timeline) -> int:
    """Return a number of slots in which the shortest action gets one."""
    shortest = min(span.end - span.start for row in timeline.rows for span in row)
    return min(2000, round(timeline.makespan / shortest))


def _text(timeline: Timeline, *, num_slots: int) -> str:
    width = shutil.get_terminal_size((100, 24)).columns
    return as_text(timeline, num_slots=num_slots, width=width)


def _summary(timeline: Timeline) -> str:
    peaks = [timeline.peak_in_shares(rank) for rank in range(len(timeline.rows))]
    return f"bubble {timeline.total_bubble:.1%}, peak activations {max(peaks):g}"


def figures(timeline: Timeline) -> str:
    """Tell a line for each rank, and the whole."""
    lines = ["rank  computes     idle   bubble  peak activations: of a stage  of a rank's layers"]
    for rank in range(len(timeline.rows)):
        busy = timeline.busy(rank)
        lines.append(
            f"{rank:>4}  {busy:>8g} {timeline.makespan - busy:>8g} {timeline.bubble(rank):>8.2%}"
            f"{timeline.peak(rank):>28}  {timeline.peak_in_shares(rank):>18g}"
        )
    lines.append(
        f"in all {timeline.makespan:g}; bubble {timeline.total_bubble:.2%} of the computing "
        "(idle / computes)"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
