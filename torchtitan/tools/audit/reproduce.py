"""Write commands that train a run again, with all changes of settings and layout.

The ledger has the settings and layout of each start. Steps that were lost and trained again, and
restarts without changes, are left out. Each of the remaining legs is trained by a command, from the
checkpoint of the previous one. The ledger may come from a stranger, so its values are quoted, and
the script runs in the folder where it is started.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.base.errors import DataError, printable
from torchtitan.base.urls import is_url
from torchtitan.config.sources import flatten, parse, to_toml
from torchtitan.job import Config
from torchtitan.metrics.ledger import LEDGER, read_ledger
from torchtitan.metrics.rows import Row
from torchtitan.resume_rules import Job
from torchtitan.tools.audit.history import without_places
from torchtitan.tools.audit.rerun import check_own

SCRIPT = "reproduce.sh"
SAME_RUN = ("job", "metrics", "profiling", "comm", "checkpoint")
"""Sections that change neither the training nor its rounding."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Steps that one command trains."""

    start: Row
    config: Config
    last_step: int

    @property
    def first_step(self) -> int:
        """The first of them."""
        return int(self.start["step"]) + 1

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.last_step}"
        return _line(f"{steps}: {self.start['layout']}, {self.start['time']}")


def main(options: argparse.Namespace) -> int:
    """Write the script and the settings of each start."""
    out: Path = options.out
    legs = find_legs(options.run)
    for leg in legs:
        check_own(leg.config)
    out.mkdir(parents=True)
    for number, leg in enumerate(legs, start=1):
        (out / f"start_{number}.toml").write_text(to_toml(leg.config), encoding="utf-8")
    lines = [*_script(legs, run=options.run), ""]
    (out / SCRIPT).write_text("\n".join(lines), encoding="utf-8")
    (out / SCRIPT).chmod(0o755)
    for leg in legs:
        sys.stdout.write(f"{leg}\n")
    sys.stdout.write(f"train it again: {shlex.quote(str(out / SCRIPT))}\n")
    return 0


def _line(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def find_legs(run: Path) -> list[Leg]:
    """Return the legs of a run.

    Raises:
        DataError: It has no ledger, or trained no step.
    """
    rows = read_ledger(run)
    if not rows:
        raise DataError(f"{run} has no {LEDGER}, which version 0.3 and later write")
    starts: list[Row] = []
    end = 0
    for row in rows:
        if row["event"] == "start":
            end = row["step"]
            while starts and starts[-1]["step"] >= end:
                starts.pop()
            is_same = starts and starts[-1]["layout"] == row["layout"]
            if not (is_same and _shape(starts[-1]) == _shape(row)):
                starts.append(row)
        elif row["event"] in ("checkpoint", "end"):
            end = max(end, row["step"])
    firsts = [row["step"] for row in starts]
    if not starts or firsts[0] > 0:
        raise DataError(
            f"{run / LEDGER} must have a start at step 0, its first is at step "
            f"{firsts[0] if firsts else 'none'}: the run was started in another folder or by "
            f"another version"
        )
    legs = [
        Leg(start=start, config=without_places(_config(start, run=run)), last_step=last)
        for start, last in zip(starts, [*firsts[1:], end], strict=True)
        if last > start["step"]
    ]
    if not legs:
        raise DataError(f"{run} has trained no step")
    return legs


def _config(start: Row, *, run: Path = Path()) -> Config:
    return Job.stored(start["config"], file=run / LEDGER).config


def _shape(start: Row) -> dict[tuple[str, ...], Any]:
    """Return the facts of a start that change the training."""
    flat = flatten(parse(start["config"], origin=LEDGER), origin=LEDGER)
    shape = {path: one.value for path, one in flat.items() if path[0] not in SAME_RUN}
    shape[("code",)] = start["code"]
    # the number of steps matters only as the length of the schedule
    config = _config(start)
    total = config.lr_scheduler.total_steps or config.training.steps
    shape["training", "steps"] = shape["lr_scheduler", "total_steps"] = total
    return shape


def _script(legs: Sequence[Leg], *, run: Path) -> Iterator[str]:
    """Yield the lines of a script that trains all legs into a run beside it."""
    first = legs[0].start
    yield "#!/usr/bin/env bash"
    yield _line(f"# Trains {run} again, in the same layouts, into `run` beside this file.")
    yield _line(f"# Relative paths start at the current folder; it was {first['folder']}.")
    yield "# The result is bit-identical with the same code, versions and hardware:"
    for key, value in {**first["versions"], **_commits([leg.start for leg in legs])}.items():
        yield _line(f"#   {key} {value}")
    yield "set -euo pipefail"
    yield 'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
    for number, leg in enumerate(legs, start=1):
        yield f"\n# {leg}"
        ranks, here = leg.start["world_size"], leg.start["hardware"]["ranks_per_machine"]
        launcher = "python"
        if ranks > 1:
            nodes = "--standalone"
            if ranks > here:
                nodes = f"--nnodes {ranks // here} --rdzv_backend c10d"
                nodes += ' --rdzv_endpoint "$RENDEZVOUS"'
            launcher = f"python -m torchtitan.launch {nodes} --nproc_per_node {min(ranks, here)}"
        settings = {"training.steps": leg.last_step, **_settings(leg, is_last=leg is legs[-1])}
        lines = [
            f"{launcher} -m torchtitan.train",
            f'--job.config_file "$here/start_{number}.toml"',
            '--job.dump_folder "$here/run"',
            *(f"--{key} {shlex.quote(str(value))}" for key, value in settings.items()),
        ]
        yield " \\\n    ".join(lines)


def _settings(leg: Leg, *, is_last: bool) -> dict[str, object]:
    """Return the settings to change so that the next command can resume."""
    config = leg.config
    checkpoint, settings = config.checkpoint, dict[str, object]()
    if config.lr_scheduler.total_steps is None and config.training.steps != leg.last_step:
        settings["lr_scheduler.total_steps"] = config.training.steps
    if not checkpoint.enable:
        settings["checkpoint.enable"] = "true"
    if is_url(checkpoint.folder):
        settings["checkpoint.folder"] = checkpoint.staging_folder
    if checkpoint.load_step != -1 and leg.first_step > 1:
        settings["checkpoint.load_step"] = -1  # the latest is the one to load
    if not is_last:  # only the last command exports
        for key in ("last_save_in_hf", "last_save_model_only"):
            if getattr(checkpoint, key):
                settings[f"checkpoint.{key}"] = "false"
    return settings


def _commits(starts: Sequence[Row]) -> dict[str, str]:
    """Return the commits of the first start, and whether a later start had other code."""
    found = {}
    for name, state in starts[0]["git"].items():
        if state is not None:
            changes = " with uncommitted changes" if state["diff_sha256"] else ""
            differs = any(start["git"].get(name) != state for start in starts)
            later = ", other code at a later start" if differs else ""
            found[f"code of {name}:"] = f"commit {state['commit']}{changes}{later}"
    return found
