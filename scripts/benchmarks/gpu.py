"""All that is to be known of one GPU, in one call: speed, MFU, memory, and what a step is spent on.

    1B, 3B     a step of Llama 3.2 beside a bare loop, transformers and its Trainer: 8192 tokens in
               bfloat16, compiled; 3B with all blocks recomputed (the command `train --apart`)
    others     jobs of 1B started as any job is: with each policy of recomputation, in float8, with
               32k tokens, and with the profiler on, whose trace is read

Each has a process of its own, one after the other, and one that fails is named with its reason and
does not end the others. MFU is said against the vendor's figure (torchtitan/base/device.py). --toy
takes sizes at which all of it runs on a CPU, to try this command; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.calibrate import write_constants
from scripts.benchmarks.pairs import Comparison, Report
from scripts.benchmarks.trace import top_operations
from torchtitan.base.device import device_name, local_device
from torchtitan.metrics.rows import Row, read_rows

SUMMARY = "all figures of one GPU, in one call: speed, MFU, memory, a trace"
ROOT = Path(__file__).parents[2]
SELECTIVE = "--activation_checkpoint.mode=selective"
BUDGET = "--activation_checkpoint.mode=memory_budget"
COMPILED = "--compile.enable"
FLOAT8 = "--model.converters=float8"
COMPARISONS: Mapping[str, tuple[str, ...]] = {
    "1B": ("--flavor", "1B", "--compile"),
    "3B": ("--flavor", "3B", "--compile", "--recompute", "full"),
}
JOBS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": (COMPILED, "--activation_checkpoint.mode=none"),
    "float8": (COMPILED, "--activation_checkpoint.mode=none", FLOAT8),
    "not compiled": ("--activation_checkpoint.mode=none",),
    "full": (COMPILED, "--activation_checkpoint.mode=full"),
    "every 2nd block": (COMPILED, SELECTIVE, "--activation_checkpoint.selective_ac_option=2"),
    "by operator": (SELECTIVE, "--activation_checkpoint.selective_ac_option=op"),
    "budget 0.5": (
        COMPILED,
        BUDGET,
        "--activation_checkpoint.memory_budget=0.5",
    ),
    "32k tokens": (
        SELECTIVE,
        "--activation_checkpoint.selective_ac_option=op",
        "--training.seq_len=32768",
    ),
    "trace": (
        COMPILED,
        "--activation_checkpoint.mode=none",
        "--profiling.enable_profiling=true",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the toy has smaller."""

    job: tuple[str, ...]
    comparison: tuple[str, ...]
    is_toy: bool

    def fit(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command without those that make it large or slow."""
        if not self.is_toy:
            return list(words)
        words = [word for word in words if word != "--compile"]
        if FLOAT8 in words:
            words.append("--quantize.linear.float8.emulate")
        small = ["tiny" if w in COMPARISONS else w.replace("32768", "64") for w in words]
        # a backend that makes no code, where the policy is not that of the one that does
        quick = COMPILED in words and BUDGET not in words
        return [*small, "--compile.backend=aot_eager"] if quick else small


REAL = Sizes(
    job=(
        "--model.flavor=1B",
        "--model.tokenizer_path=bpe_2048",
        "--training.seq_len=8192",
        "--training.local_batch_size=1",
        "--training.steps=30",
        "--metrics.log_freq=5",
        "--profiling.profile_freq=10",
    ),
    comparison=("--seq_len", "8192", "--batch", "1", "--steps", "5", "--dtype", "bfloat16"),
    is_toy=False,
)
TOY = Sizes(
    job=(
        "--model.flavor=tiny",
        "--model.tokenizer_path=byte",
        "--training.seq_len=32",
        "--training.local_batch_size=2",
        "--training.steps=5",
        "--metrics.log_freq=1",
        "--profiling.profile_freq=5",
    ),
    comparison=("--seq_len", "32", "--batch", "2", "--steps", "2", "--others", "bare loop"),
    is_toy=True,
)
NOT_COUNTED = 2
"""Rows of the first steps, which compile and find no memory."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    everything = [*COMPARISONS, *JOBS]
    parser.add_argument("--toy", action="store_true", help="sizes at which it runs on a CPU")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="measure the planner's constants alone, and write them for its --device FILE",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=everything,
        default=everything,
        metavar="NAME",
        help=f"what to measure, of {', '.join(everything)}; all by default",
    )


def measure(args: argparse.Namespace) -> Report:
    """Run one after the other; what fails is noted."""
    if args.calibrate is not None:
        return _calibrate(args.calibrate, is_toy=args.toy)
    sizes = TOY if args.toy else REAL
    comparisons: list[Comparison] = []
    notes: list[str] = []
    more: dict[str, Any] = {"train": {}, "jobs": {}, "top_operations": []}
    for name in args.only:
        with tempfile.TemporaryDirectory() as place:
            try:
                if name in COMPARISONS:
                    found = _compare(name, sizes=sizes, pairs=args.pairs, folder=Path(place))
                    more["train"][name] = found
                    comparisons += _comparisons_in(found, name=name)
                    notes += [f"{name}: {note}" for note in found["notes"]]
                else:
                    figures = _run_job(name, sizes=sizes, folder=Path(place))
                    more["jobs"][name] = figures
                    notes.append(f"{name}: {_say(figures)}")
                if name == "trace":
                    more["top_operations"] = top = _read_trace(Path(place))
                    said = "; ".join(f"{each[:60]} {part:.1%}" for each, part in top)
                    notes.append(f"{name}, longest operations: {said}")
            except subprocess.CalledProcessError as failed:
                notes.append(
                    f"{name}: not measured, it ended with code {failed.returncode}: "
                    f"{failed.stderr.strip()[-600:]}"
                )
    return Report(
        about={
            "sizes": "toy" if args.toy else "real",
            "device": device_name(local_device(0)),
            "torch": torch.__version__,
        },
        comparisons=comparisons,
        notes=notes,
        more=more,
    )


def _calibrate(file: Path, *, is_toy: bool) -> Report:
    device = local_device(0)
    found = asdict(write_constants(file, device=device, is_toy=is_toy))
    notes = [f"{name}: {value}" for name, value in found.items()]
    about = {"device": device_name(device), "torch": torch.__version__, "written": str(file)}
    return Report(about=about, comparisons=[], notes=notes, more=found)


def _compare(name: str, *, sizes: Sizes, pairs: int, folder: Path) -> dict[str, Any]:
    out = folder / "figures.json"
    _start(
        str(ROOT / "scripts" / "benchmark.py"),
        "train",
        "--apart",
        *sizes.fit(COMPARISONS[name]),
        *sizes.comparison,
        *("--pairs", str(pairs), "--out", str(out)),
    )
    figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return figures


def _comparisons_in(figures: Mapping[str, Any], *, name: str) -> list[Comparison]:
    return [
        Comparison(
            f"{name}: {row['name']}",
            row["target"],
            row["ours_s"],
            row["other_s"],
            row["amount"],
            row["unit"],
        )
        for row in figures["comparisons"]
    ]


def _run_job(name: str, *, sizes: Sizes, folder: Path) -> dict[str, float]:
    _start(
        *("-m", "torchtitan.train"),
        f"--job.dump_folder={folder}",
        "--training.dataset=synthetic",
        "--training.mixed_precision_param=bfloat16",
        *sizes.job,
        *sizes.fit(JOBS[name]),
    )
    return summarize(read_rows(folder / "metrics.jsonl"))


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """Return medians over the rows that count, MFU where they have one, and the highest peak."""
    counted = rows[NOT_COUNTED:]
    medians = {
        key: statistics.median(row[key] for row in counted)
        for key in ("tokens_per_second", "step_time_s", "mfu")
        if all(row[key] is not None for row in counted)
    }
    return medians | {"memory_peak_gib": max(row["memory_peak_gib"] for row in rows)}


def _say(figures: Mapping[str, float]) -> str:
    utilisation = f"MFU {figures['mfu']:.1f} %, " if "mfu" in figures else ""
    return (
        f"{figures['tokens_per_second']:,.0f} tokens/s, step {figures['step_time_s']:.4f} s, "
        f"{utilisation}peak memory {figures['memory_peak_gib']:.2f} GiB"
    )


def _read_trace(folder: Path) -> list[tuple[str, float]]:
    return top_operations(max(folder.glob("profile_traces/step-*/rank_0.json")))


def _start(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
