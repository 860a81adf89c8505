"""Does training a run's steps again give what it logged?

    python -m torchtitan audit verify RUN --steps 5

First every file of every checkpoint is compared with its checksum, and each manifest with its hash
in the ledger. Then steps drawn at random are trained again from the checkpoint before each of them,
and all figures that were logged on the way are compared bit for bit. With --states each of these
stretches is trained up to its next checkpoint, and that is compared too, tensor by tensor.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.checkpoint.checksums import verify
from torchtitan.checkpoint.storage import find_steps
from torchtitan.job import CONFIG_FILE
from torchtitan.metrics.ledger import hash_manifest, read_ledger
from torchtitan.metrics.rows import RECORD, Row, read_rows
from torchtitan.resume_rules import Job
from torchtitan.tools.audit.history import Stretch, read_history, stretch_of
from torchtitan.tools.audit.rerun import read_starts, rerun, why_not
from torchtitan.tools.compare.compare_runs import Comparison, compare_checkpoints, say


def main(argv: Sequence[str]) -> int:
    """Verify; return 0 if all is as it was, 1 if not; raise UserError for mistakes."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan audit verify",
        description="Tell whether a run's steps, trained again, give what it logged.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the job.dump_folder of the run")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="steps to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--states", action="store_true", help="train on to the next checkpoint and compare it"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="relative difference that counts as equal, for other hardware",
    )
    add_trust_code(parser)
    arguments = parser.parse_args(argv)
    if arguments.steps < 0:
        raise ConfigError(f"--steps must be at least 0, got {arguments.steps}")
    with trusting_stored(arguments.trust_code):
        return _verify(arguments)


def _verify(arguments: argparse.Namespace) -> int:
    damaged = _changed_files(arguments.run)
    for step, mistakes in damaged.items():
        for mistake in mistakes:
            say(f"step-{step}: {mistake}")
    if not damaged:
        say("all files are those that the manifests list")
    wrong, rows = bool(damaged), read_rows(arguments.run / f"{RECORD}.jsonl")
    # a damaged checkpoint is not loaded: what can be trained again still is
    for stretch, last in _chosen(arguments, rows=rows, damaged=damaged):
        wrong |= not _is_same(arguments, stretch, rows=rows, last=last)
    say("different from what was logged" if wrong else "as it was logged")
    return int(wrong)


def _changed_files(run: Path) -> dict[int, list[str]]:
    """Return what is wrong with the files of checkpoints, by step."""
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
            mistakes.append("its manifest is not the one that the ledger knows")
        if mistakes:
            found[step] = mistakes
    return found


def _chosen(
    arguments: argparse.Namespace, *, rows: Sequence[Row], damaged: Collection[int]
) -> Iterator[tuple[Stretch, int]]:
    """Draw the steps; yield each stretch that has some, and the last step to train of it."""
    history, starts = read_history(arguments.run), read_starts(arguments.run)
    whole = [
        one for one in history if one.first_step - 1 not in damaged and not why_not(starts, one)
    ]
    logged = sorted({int(row["step"]) for row in rows})
    could = [
        step for step in logged if any(one.first_step <= step <= one.last_step for one in whole)
    ]
    if len(could) < arguments.steps:
        raise DataError(
            f"--steps must be at most the {len(could)} logged steps behind a whole checkpoint or "
            f"the beginning, got {arguments.steps}"
        )
    drawn = sorted(random.Random(arguments.seed).sample(could, arguments.steps))
    say(f"steps drawn: {', '.join(map(str, drawn)) or 'none'}")
    last_steps: dict[int, int] = {}
    for step in drawn:
        last_steps[history.index(stretch_of(history, step))] = step
    for number, last in last_steps.items():
        stretch = history[number]
        yield stretch, stretch.last_step if arguments.states and _is_saved(stretch) else last


def _is_saved(stretch: Stretch) -> bool:
    return stretch.fingerprint is not None


def _is_same(
    arguments: argparse.Namespace, stretch: Stretch, *, rows: Sequence[Row], last: int
) -> bool:
    """Train a stretch up to `last` again; compare, and say so."""
    first, run = stretch.first_step, arguments.run
    sys.stderr.write(f"training steps {first} to {last} again: {stretch.dims}\n")
    found = Comparison(arguments.tolerance)
    with tempfile.TemporaryDirectory() as temporary:
        again = rerun(run, stretch, last_step=last, out=Path(temporary))
        repeated = {row["step"]: row for row in again.rows}
        logged = [row for row in rows if first <= row["step"] <= last]
        found.compare_rows(
            [_shared(row, repeated[row["step"]]) for row in logged],
            [_shared(repeated[row["step"]], row) for row in logged],
        )
        name = f"step-{last}"
        saved = run / stretch.config.checkpoint.local_folder / name
        if arguments.states and _is_saved(stretch) and last == stretch.last_step:
            compare_checkpoints(found, saved, again.folder / "checkpoint" / name, states=False)
    figures = sum(compared for _, compared, _, _ in found.table)
    if found.differences:
        say(f"steps {first} to {last}: different; first: {found.differences[0]}")
        return False
    say(f"steps {first} to {last}: {figures} figures and tensors equal")
    return True


def _shared(row: Row, other: Row) -> Row:
    """Return the figures that both rows have: validation and callbacks are not run again."""
    return {key: value for key, value in row.items() if key in other}
