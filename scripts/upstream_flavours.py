"""Run the integration tests of torchtitan 0.2.2 with this trainer, by its own commands.

    python scripts/upstream_flavours.py --out outputs/flavours [NAME ...]

`upstream_flavours.toml` holds their options as they are written there. The options `OURS` are added
so that they run on CPU ranks, with 4 steps instead of 10 and 8 instead of 20. The losses of the
first 4 steps are compared with those of one rank with the same model and global batch.

A test runs unchanged if each of its commands ends with exit code 0. With exit code 2 it is refused,
otherwise it fails. Results are kept in OUT/results.json, so that NAMEs may be run one by one; the
table shows all of them. Exit code 0 if no test failed and no loss differs by more than `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # works without being installed

from torchtitan.config.settings import parse
from torchtitan.metrics.rows import read_rows

TABLE: Any = parse(Path(__file__).with_suffix(".toml").read_text("utf-8"), origin="flavours")
FLAVOURS: dict[str, list[Any]] = TABLE["features"] | TABLE["models"]
TOLERANCE, STEPS, SEQ_LEN = 2e-5, 4, 128
OURS = [
    "--training.dataset=python_stdlib",
    f"--training.seq_len={SEQ_LEN}",
    "--training.mixed_precision_param=float32",
]
ARTIFACTS = "artifacts-to-be-uploaded"  # of their runner, named by a flavour
SCHEDULE = "tests/assets/custom_schedule.csv"
SHAPES_LOSS = re.compile(r"--(model|optimizer|training)\.(?!enable_cpu_offload|dataloader|steps)")


def options(command: str) -> list[str]:
    """Return the trainer's options of a command, and `OURS`."""
    words = [re.sub(r"step-10/?$", f"step-{STEPS}", word) for word in shlex.split(command)]
    words += [*OURS, f"--training.steps={2 * STEPS if 'steps 20' in command else STEPS}"]
    return [
        *words,
        *(["--validation.dataset=synthetic"] if "--validation.dataset" in words else []),
    ]


def prepare(folder: Path) -> None:
    """Write the files that the flavours name: the base of all, and a schedule for 2 ranks."""
    (folder / SCHEDULE).parent.mkdir(parents=True, exist_ok=True)
    (folder / "base.toml").write_text(tomli_w.dumps(TABLE["base"]))
    rows = []
    for stages in ((0, 2), (1, 3)):  # all forwards, then all backwards, of 8 microbatches
        actions = [f"{stage}F{i}" for stage in stages for i in range(8)]
        actions += [f"{stage}B{i}" for stage in reversed(stages) for i in range(8)]
        rows.append(",".join(actions))
    (folder / SCHEDULE).write_text("\n".join(rows))


class Runs:
    """Starts commands in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._references: dict[tuple[str, ...], list[float]] = {}
        prepare(self.folder)

    def run(self, name: str, ranks: int, commands: Sequence[str]) -> dict[str, Any]:
        """Run the commands of a flavour until one is refused or fails."""
        gaps = []
        for number, command in enumerate(commands):
            code, log = self._start(name, ranks, command, log=f"{name}.{number}.log")
            if code:
                outcome = "refused" if code == 2 else "failed"
                return {"outcome": outcome, "message": _first_message(log), "gap": None}
            if command.startswith("--") and "initial_load_path" not in command:
                gaps.append(self._gap(name, command))
        return {"outcome": "ran", "message": "", "gap": max(gaps, default=None)}

    def _start(self, name: str, ranks: int, command: str, *, log: str) -> tuple[int, Path]:
        folder, path = f"{ARTIFACTS}/{name}", self.folder / log
        script, _, rest = command.partition(" ")
        words = [str(ROOT / "run_train.sh"), *options(command), f"--job.dump_folder={folder}"]
        if script == "estimate":  # a script of torchtitan 0.2, here the planner
            words = [sys.executable, "-m", "torchtitan", "plan", "memory", *options(rest)]
            words += [f"--world_size={ranks}", "--job.config_file=base.toml"]
        if script == "generate":
            words = [sys.executable, "-m", "torchtitan", "generate", "--checkpoint", folder]
            words += ["--prompt", "What is the meaning of life?"]
        environ = {**os.environ, "NGPU": str(ranks), "CONFIG_FILE": "base.toml"}
        environ["PYTHONPATH"] = str(ROOT)
        with path.open("w") as out:
            done = subprocess.run(words, cwd=self.folder, env=environ, stdout=out, stderr=out)
        return done.returncode, path

    def _gap(self, name: str, command: str) -> float:
        """Return the largest difference of a loss from one rank's."""
        rows = list(read_rows(self.folder / ARTIFACTS / name / "metrics.jsonl"))[:STEPS]
        shaping = [part for part in re.split(r" (?=--)", command) if SHAPES_LOSS.match(part)]
        batch = rows[0]["num_tokens"] // SEQ_LEN
        key = (*shaping, f"--training.global_batch_size={batch}")
        if key not in self._references:
            one = f"one-rank-{name}-{len(self._references)}"
            code, log = self._start(one, 1, " ".join(key), log=f"{one}.log")
            assert code == 0, log
            done = list(read_rows(self.folder / ARTIFACTS / one / "metrics.jsonl"))
            self._references[key] = [row["loss"] for row in done]
        pairs = zip(rows, self._references[key], strict=True)
        return max(abs(row["loss"] - loss) for row, loss in pairs)


def _first_message(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"(command line|default|base\.toml): ", line)]
    return [*said, *lines[-1:], ""][0]


def main(argv: Sequence[str]) -> int:
    """Run the named flavours and print all results."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", help="flavours to run (all)")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    arguments = parser.parse_args(argv)
    runs, stored = Runs(arguments.out), arguments.out / "results.json"
    results = json.loads(stored.read_text()) if stored.is_file() else {}
    for name in arguments.names or FLAVOURS:
        ranks, *commands = FLAVOURS[name]
        results[name] = runs.run(name, ranks, commands)
        stored.write_text(json.dumps(results, indent=1))
        print(f"{name}: {results[name]['outcome']}", file=sys.stderr, flush=True)
    for name, one in ((name, results[name]) for name in FLAVOURS if name in results):
        gap = "" if one["gap"] is None else f"{one['gap']:.1e}"
        print(f"| {name} | {one['outcome']} | {gap} | {one['message']} |")
    ran = [one for one in results.values() if one["outcome"] == "ran"]
    print(f"{len(ran)} of {len(FLAVOURS)} run as they stand")
    differ = [one for one in ran if one["gap"] is not None and not one["gap"] <= TOLERANCE]
    return 1 if differ or any(one["outcome"] == "failed" for one in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
