"""The commands that would train a run again, with all that was done to it on the way.

    python -m torchtitan audit reproduce RUN --out again

The ledger has the settings and layout of each start. Steps that a later start went back behind were
undone, and a start that changed nothing went on as if there had been no stop: neither is repeated.
What is left are stretches, each trained by a command of its own, which goes on from the checkpoint
of the one before.

The ledger may be a stranger's: what it says is quoted, and the script runs in the folder in which
it is started.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.base.custom import add_trust_code, check_trusted, trusting_stored
from torchtitan.base.errors import ConfigError, DataError, printable
from torchtitan.base.urls import is_url, local_path
from torchtitan.config.sources import flatten, parse, to_toml
from torchtitan.job import Config, find_own
from torchtitan.metrics.ledger import LEDGER, read_ledger
from torchtitan.metrics.rows import Row
from torchtitan.resume_rules import Job
from torchtitan.tools.audit.history import without_places

SCRIPT = "reproduce.sh"
SAME_RUN = ("job", "metrics", "profiling", "comm", "checkpoint")
"""Sections that shape neither the training nor its rounding."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps that one command trains."""

    start: Row
    last_step: int

    @property
    def first_step(self) -> int:
        """The first of them."""
        return int(self.start["step"]) + 1


def main(argv: Sequence[str]) -> int:
    """Write the commands; raise UserError for mistakes."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan audit reproduce",
        description="Write the commands that train a run again, interventions included.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the job.dump_folder of the run")
    parser.add_argument("--out", type=local_path, required=True, help="a new folder for them")
    add_trust_code(parser)
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    if out.exists():
        raise ConfigError(f"--out must be a new folder, got {out}, which exists; name another")
    with trusting_stored(arguments.trust_code):
        stretches = find_stretches(arguments.run)
        jobs = [_job_of(stretch, run=arguments.run) for stretch in stretches]
    out.mkdir(parents=True)
    for number, job in enumerate(jobs, start=1):
        (out / f"start_{number}.toml").write_text(to_toml(job), encoding="utf-8")
    lines = list(script_of(stretches, run=arguments.run, out=out))
    (out / SCRIPT).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / SCRIPT).chmod(0o755)
    for stretch in stretches:
        sys.stdout.write(f"{describe(stretch)}\n")
    sys.stdout.write(f"train it again: {shlex.quote(str(out / SCRIPT))}\n")
    return 0


def _job_of(stretch: Stretch, *, run: Path) -> Config:
    """Return the settings of a stretch; raises ConfigError if they name code that is not trusted:
    the script would run it."""
    config = Job.stored(stretch.start["config"], file=run / LEDGER).config
    for path, text in find_own(config):
        check_trusted(text, key=".".join(path))
    return without_places(config)


def describe(stretch: Stretch) -> str:
    """Say what a stretch is in one line."""
    start = stretch.start
    said = f"steps {stretch.first_step} to {stretch.last_step}: {start['layout']}, {start['time']}"
    return _in_a_line(said)


def _in_a_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def find_stretches(run: Path) -> list[Stretch]:
    """Return what is left of a run's starts.

    Raises:
        DataError: It has no ledger, or trained nothing.
    """
    rows = read_ledger(run)
    if not rows:
        raise DataError(
            f"a run that can be reproduced has a {LEDGER}, which versions from 0.3 on write; "
            f"{run} has none"
        )
    starts: list[Row] = []
    end = 0
    for row in rows:
        if row["event"] == "start":
            end = row["step"]
            while starts and starts[-1]["step"] >= end:
                starts.pop()
            if not (starts and _goes_on(starts[-1], row)):
                starts.append(row)
        elif row["event"] in ("checkpoint", "end"):
            end = max(end, row["step"])
    firsts = [row["step"] for row in starts]
    if not starts or firsts[0] > 0:
        raise DataError(
            f"{run / LEDGER} must begin with a start at step 0, got one at step "
            f"{firsts[0] if firsts else 'none'}: the run was begun by another version, or in "
            f"another folder; its first steps cannot be trained again"
        )
    lasts = [*firsts[1:], end]
    found = [Stretch(start=s, last_step=n) for s, n in zip(starts, lasts, strict=True)]
    if not (found := [stretch for stretch in found if stretch.last_step >= stretch.first_step]):
        raise DataError(f"{run} must have trained a step to be trained again, and it has not")
    return found


def _goes_on(before: Row, row: Row) -> bool:
    """Tell whether a start trains on as the one before would have, in the same layout."""
    return bool(before["layout"] == row["layout"] and _shape(before) == _shape(row))


def _shape(start: Row) -> dict[tuple[str, ...], Any]:
    flat = flatten(parse(start["config"], origin=LEDGER), origin=LEDGER)
    shape = {path: one.value for path, one in flat.items() if path[0] not in SAME_RUN}
    shape[("code",)] = start["code"]
    # the length of the training counts as that of the schedule
    shape["training", "steps"] = shape["lr_scheduler", "total_steps"] = _total_steps(start)
    return shape


def _total_steps(start: Row) -> int:
    config = Job.stored(start["config"], file=LEDGER).config
    return config.lr_scheduler.total_steps or config.training.steps


def script_of(stretches: Sequence[Stretch], *, run: Path, out: Path) -> Iterator[str]:
    """Yield the lines of a shell script that trains all stretches into a run beside it."""
    folder = stretches[0].start["folder"]
    yield "#!/usr/bin/env bash"
    yield _in_a_line(f"# Trains {run} again, in the same layouts, into `run` beside this file.")
    yield _in_a_line(f"# Relative paths begin where you start it; the run was started in {folder}.")
    yield "# Bit for bit where code, versions and hardware are those of the first time:"
    for key, value in {**stretches[0].start["versions"], **_commits(stretches)}.items():
        yield _in_a_line(f"#   {key} {value}")
    yield "set -euo pipefail"
    yield 'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
    for number, stretch in enumerate(stretches, start=1):
        start = stretch.start
        yield ""
        yield f"# {describe(stretch)}"
        options = {
            "training.steps": stretch.last_step,
            **_changed(start, last_step=stretch.last_step, exports=number == len(stretches)),
        }
        ranks, here = start["world_size"], start["hardware"]["ranks_per_machine"]
        launch = "python"
        if ranks > 1:
            nodes = "--standalone"
            if ranks > here:
                yield f"# on {ranks // here} machines: run this file on each, and set RENDEZVOUS"
                nodes = (
                    f'--nnodes {ranks // here} --rdzv_backend c10d --rdzv_endpoint "$RENDEZVOUS"'
                )
            launch = f"python -m torchtitan.launch {nodes} --nproc_per_node {min(ranks, here)}"
        lines = [
            f"{launch} -m torchtitan.train",
            f'--job.config_file "$here/start_{number}.toml"',
            '--job.dump_folder "$here/run"',
            *(f"--{key} {shlex.quote(str(value))}" for key, value in options.items()),
        ]
        yield " \\\n    ".join(lines)


def _changed(start: Row, *, last_step: int, exports: bool) -> dict[str, object]:
    """Return what has to be set otherwise than at the start, to stop and go on where it did."""
    config = Job.stored(start["config"], file=LEDGER).config
    checkpoint, options = config.checkpoint, dict[str, object]()
    if config.lr_scheduler.total_steps is None and config.training.steps != last_step:
        options["lr_scheduler.total_steps"] = config.training.steps
    if not checkpoint.enable:
        options["checkpoint.enable"] = "true"
    if is_url(checkpoint.folder):
        options["checkpoint.folder"] = checkpoint.staging_folder
    if checkpoint.load_step != -1 and start["step"] > 0:
        options["checkpoint.load_step"] = -1  # there are no later ones
    if not exports:  # what is exported at the end belongs to the end
        for key in ("checkpoint.last_save_in_hf", "checkpoint.last_save_model_only"):
            if getattr(checkpoint, key.partition(".")[2]):
                options[key] = "false"
    return options


def _commits(stretches: Sequence[Stretch]) -> dict[str, str]:
    """Name the commits of the first start, and say if later ones had others."""
    states = [stretch.start["git"] for stretch in stretches]
    found = {}
    for name, state in states[0].items():
        if state is not None:
            changed = " with changes that are in no commit" if state["diff_sha256"] else ""
            others = any(other.get(name) != state for other in states)
            later = ", and another at a later start" if others else ""
            found[f"code of {name}:"] = f"commit {state['commit'][:12]}{changed}{later}"
    return found
