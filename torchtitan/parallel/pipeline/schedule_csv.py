"""A pipeline schedule of one's own, read from a CSV file in torch's compute-only format.

A row stands for a rank; each cell is empty or one action, stage-letter-microbatch: `0F3` is stage
0's forward of microbatch 3, `B` a whole backward, `I` and `W` its halves for inputs and weights,
`(0F3;3B1)OVERLAP_F_B` two in turn. All is checked when the file is read: a schedule that misses an
action, or in which two ranks wait for each other, would hang a run after its first step.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.parallel.pipeline.schedules import KINDS, Action, Kind, Table

_SINGLE = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B")
# each mistake is listed, but a file that is all wrong is not quoted in full
_MAX_MISTAKES = 10


def read_csv(path: str | Path) -> Table:
    """Return the table of a schedule file.

    Raises:
        ConfigError: naming the file and what is malformed, missing, repeated or never reached.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = [line for line in csv.reader(file) if any(cell.strip() for cell in line)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path} cannot be read as a schedule in CSV: {reason}; name a file with a row of "
            f"actions for each pipeline rank"
        ) from error
    mistakes: list[str] = []
    table = [_parse_row(line, rank=rank, mistakes=mistakes) for rank, line in enumerate(lines)]
    if not table:
        mistakes.append("no row holds an action; write a row for each pipeline rank")
    mistakes = mistakes or _mistakes(table)
    if mistakes:
        more = len(mistakes) - _MAX_MISTAKES
        tail = [f"... and {more} more"] if more > 0 else []
        raise ConfigError([f"{path}: {line}" for line in [*mistakes[:_MAX_MISTAKES], *tail]])
    return table


def _parse_row(cells: list[str], *, rank: int, mistakes: list[str]) -> list[Action]:
    row = []
    for column, cell in enumerate(cells, start=1):
        text = cell.strip()
        if not text:
            continue
        pair = _PAIR.fullmatch(text)
        parts = pair.groups() if pair else (text,)
        for part in parts:
            action = _SINGLE.fullmatch(part)
            if action is None:
                mistakes.append(
                    f"rank {rank}, cell {column}: {text!r} is no action; write stage, one of "
                    "F B I W, microbatch, as in 0F3"
                )
                continue
            stage, letter, microbatch = action.groups()
            row.append(Action(int(stage), KINDS[letter], int(microbatch)))
    return row


def _mistakes(table: Table) -> list[str]:
    """List what keeps every stage from doing each microbatch exactly once, on one rank."""
    ranks: dict[int, set[int]] = {}
    for rank, row in enumerate(table):
        for action in row:
            ranks.setdefault(action.stage, set()).add(rank)
    mistakes = [
        f"stage {stage} is on ranks {', '.join(map(str, sorted(where)))}; a stage has one rank"
        for stage, where in sorted(ranks.items())
        if len(where) > 1
    ]
    counts = Counter(action for row in table for action in row)
    num_microbatches = 1 + max(action.microbatch for action in counts)
    largest = max(num_microbatches, 1 + max(ranks))
    if largest > len(counts):
        return [
            f"a stage or microbatch has the number {largest - 1}, but there are only "
            f"{len(counts)} actions; count both from 0 on"
        ]
    for stage in range(1 + max(ranks)):
        if stage not in ranks:
            mistakes.append(f"stage {stage} is on no rank; stages are numbered from 0 on")
            continue
        for microbatch in range(num_microbatches):
            mistakes += _mistakes_of(stage, microbatch, counts)
    return mistakes or _stuck(table)


def _mistakes_of(stage: int, microbatch: int, counts: Counter[Action]) -> list[str]:
    def count(kind: Kind) -> int:
        return counts[Action(stage, kind, microbatch)]

    mistakes = []
    if count("forward") != 1:
        mistakes.append(
            f"stage {stage} has {count('forward')} forwards of microbatch {microbatch}; one is due"
        )
    backward = (count("backward"), count("backward_input"), count("backward_weight"))
    if backward not in ((1, 0, 0), (0, 1, 1)):
        mistakes.append(
            f"stage {stage} has {backward[0]} B, {backward[1]} I and {backward[2]} W of "
            f"microbatch {microbatch}; either one B, or one I and one W, is due"
        )
    return mistakes


def _stuck(table: Table) -> list[str]:
    """Play the table through; where no rank can go on, name what each of them waits at."""
    done = {action for _, action, _ in in_order(table)}
    return [
        f"rank {rank} never gets past {next(a for a in row if a not in done)}: what it needs "
        "is not done before it"
        for rank, row in enumerate(table)
        if not done.issuperset(row)
    ]


def in_order(table: Table) -> Iterator[tuple[int, Action, list[Action]]]:
    """Yield rank, action and what it had to wait for, each action after all of that.

    It ends early where every rank waits for another.
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
                    next((one for one in either if one in done), None)
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
    """List what must be done before `action`, each as alternatives of which one is in the table."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "forward":
        return [(Action(stage - 1, "forward", microbatch),)] if stage else []
    if action.kind == "backward_weight":
        return [(Action(stage, "backward_input", microbatch),)]
    needs: list[tuple[Action, ...]] = [(Action(stage, "forward", microbatch),)]
    if stage + 1 < num_stages:
        kinds: tuple[Kind, ...] = ("backward", "backward_input")
        needs.append(tuple(Action(stage + 1, kind, microbatch) for kind in kinds))
    return needs
