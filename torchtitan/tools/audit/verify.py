"""Check whether steps that are trained again give the logged figures.

`command.py` describes the verb.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from torchtitan.base.errors import DataError
from torchtitan.checkpoint.checksums import verify
from torchtitan.checkpoint.storage import find_steps
from torchtitan.job import CONFIG_FILE
from torchtitan.metrics.ledger import hash_manifest, read_ledger
from torchtitan.metrics.rows import RECORD, Row, read_rows
from torchtitan.resume_rules import Job
from torchtitan.tools.audit.history import Stretch, read_history, stretch_of
from torchtitan.tools.audit.rerun import has_several_starts, read_starts, rerun
from torchtitan.tools.compare.compare_runs import Comparison, say


def main(options: argparse.Namespace) -> int:
    """Verify a run, print the result and return the exit code."""
    run: Path = options.run
    damaged = _find_damaged(run)
    for step, mistakes in damaged.items():
        for mistake in mistakes:
            say(f"step-{step}: {mistake}")
    if not damaged:
        say("the files of all checkpoints are unchanged")
    is_equal, rows = not damaged, list(read_rows(run / f"{RECORD}.jsonl"))
    # what does not need a damaged checkpoint is still trained again
    for stretch, last in _draw(run, options, rows=rows, damaged=damaged):
        is_equal &= _is_equal(run, options, stretch, rows=rows, last=last)
    say("equal to the log" if is_equal else "different from the log")
    return int(not is_equal)


def _find_damaged(run: Path) -> dict[int, list[str]]:
    """Return the faults in the files of checkpoints, by step."""
    folder = run / Job.stored_in(run / CONFIG_FILE).config.checkpoint.local_folder
    hashes = {
        row["step"]: row["manifest_sha256"]
        for row in read_ledger(run)
        if row["event"] == "checkpoint"
    }
    found = {}
    for step in find_steps(folder):
        checkpoint = folder / f"step-{step}"
        mistakes = verify(checkpoint, group=None)
        if step in hashes and hash_manifest(checkpoint) != hashes[step]:
            mistakes.append("its manifest differs from the one in the ledger")
        if mistakes:
            found[step] = mistakes
    return found


def _draw(
    run: Path, options: argparse.Namespace, *, rows: Sequence[Row], damaged: Collection[int]
) -> Iterator[tuple[Stretch, int]]:
    """Draw steps, and yield each stretch that has any, with the last step to train."""
    history, starts = read_history(run), read_starts(run)
    usable = [
        each
        for each in history
        if each.first_step - 1 not in damaged and not has_several_starts(starts, each)
    ]
    logged = sorted({int(row["step"]) for row in rows})
    steps = [n for n in logged if any(each.first_step <= n <= each.last_step for each in usable)]
    if len(steps) < options.steps:
        raise DataError(
            f"--steps must be at most {len(steps)}, the number of logged steps that can be trained "
            f"again from the initial weights or an undamaged checkpoint, got {options.steps}"
        )
    drawn = sorted(random.Random(options.seed).sample(steps, options.steps))
    say(f"steps drawn: {', '.join(map(str, drawn)) or 'none'}")
    last_steps = {history.index(stretch_of(history, step)): step for step in drawn}
    yield from ((history[number], last) for number, last in last_steps.items())


def _is_equal(
    run: Path, options: argparse.Namespace, stretch: Stretch, *, rows: Sequence[Row], last: int
) -> bool:
    """Train a stretch up to `last` again, compare it, and print the result."""
    first = stretch.first_step
    sys.stderr.write(f"training steps {first} to {last} again: {stretch.dims}\n")
    found = Comparison(options.tolerance)
    with tempfile.TemporaryDirectory() as temporary:
        again = rerun(run, stretch, last_step=last, out=Path(temporary))
        repeated = {row["step"]: row for row in again}
        logged = [row for row in rows if first <= row["step"] <= last]
        # validation and callbacks are not repeated
        pairs = [(row, repeated[row["step"]]) for row in logged]
        found.compare_rows(
            [{key: a[key] for key in a if key in b} for a, b in pairs],
            [{key: b[key] for key in b if key in a} for a, b in pairs],
        )
    if found.differences:
        say(f"steps {first} to {last}: different; first: {found.differences[0]}")
        return False
    say(f"steps {first} to {last}: {found.table[0][1]} figures equal")
    return True
