"""All figures of one GPU in one call: speed, MFU, memory, and the operations of a step.

    1B, 3B  a step of Llama 3.2 beside a bare loop, transformers and its Trainer: 8192 tokens in
            bfloat16, compiled; 3B with all blocks recomputed (the command `train --apart`)
    others  jobs of 1B, started as any job is: with each policy of recomputation, in float8, with
            32k tokens, and with the profiler

Each runs in a process of its own, one after the other. One that fails is reported with its error,
and the rest continue. MFU is relative to the vendor's peak (torchtitan/base/device.py). --toy uses
sizes that run on a CPU, to test this command; its figures mean nothing. --calibrate FILE measures
the planner's constants instead (calibrate.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.calibrate import write_constants
from scripts.benchmarks.pairs import Comparison, Report
from torchtitan.base.device import device_name, local_device
from torchtitan.metrics.rows import Row, read_rows

ROOT = Path(__file__).parents[2]
SELECTIVE = "--activation_checkpoint.mode=selective"
OPTION = "--activation_checkpoint.selective_ac_option="
KEPT = "--activation_checkpoint.mode=none"
BUDGET = "--activation_checkpoint.mode=memory_budget"
COMPILED = "--compile.enable"
FLOAT8 = "--model.converters=float8"
COMPARISONS: Mapping[str, tuple[str, ...]] = {
    "1B": ("--flavor", "1B", "--compile"),
    "3B": ("--flavor", "3B", "--compile", "--recompute", "full"),
}
JOBS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": (COMPILED, KEPT),
    "float8": (COMPILED, KEPT, FLOAT8),
    "not compiled": (KEPT,),
    "full": (COMPILED, "--activation_checkpoint.mode=full"),
    "every 2nd block": (COMPILED, SELECTIVE, f"{OPTION}2"),
    "by operator": (SELECTIVE, f"{OPTION}op"),
    "budget 0.5": (COMPILED, BUDGET, "--activation_checkpoint.memory_budget=0.5"),
    "32k tokens": (SELECTIVE, f"{OPTION}op", "--training.seq_len=32768"),
    "trace": (COMPILED, KEPT, "--profiling.enable_profiling=true"),
}
REAL_JOB = (
    "--model.flavor=1B",
    "--model.tokenizer_path=bpe_2048",
    "--training.seq_len=8192",
    "--training.local_batch_size=1",
    "--training.steps=30",
    "--metrics.log_freq=5",
    "--profiling.profile_freq=10",
)
TOY_JOB = (
    "--model.flavor=tiny",
    "--model.tokenizer_path=byte",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.steps=5",
    "--metrics.log_freq=1",
    "--profiling.profile_freq=5",
)
REAL_STEP = ("--seq_len", "8192", "--batch", "1", "--steps", "5", "--dtype", "bfloat16")
TOY_STEP = ("--seq_len", "32", "--batch", "2", "--steps", "2", "--others", "bare loop")
NOT_COUNTED = 2
"""Rows of the first steps, which compile and allocate memory."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    names = [*COMPARISONS, *JOBS]
    parser.add_argument("--toy", action="store_true", help="sizes that run on a CPU")
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="write the planner's constants to FILE"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"measure only these of {', '.join(names)}",
    )


def measure(args: argparse.Namespace) -> Report:
    """Run one measurement after the other, and report those that fail."""
    device = local_device(0)
    about = {"device": device_name(device), "torch": torch.__version__}
    if args.calibrate is not None:
        found = asdict(write_constants(args.calibrate, device=device, is_toy=args.toy))
        notes = [f"{name}: {value}" for name, value in found.items()]
        return Report(about=about, comparisons=[], notes=notes, more=found)
    comparisons: list[Comparison] = []
    notes = []
    more: dict[str, Any] = {"train": {}, "jobs": {}, "top_operations": []}
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            try:
                if name in COMPARISONS:
                    found = _compare(name, args, folder=Path(folder))
                    more["train"][name] = found
                    comparisons += _comparisons_in(found, name=name)
                    notes += [f"{name}: {note}" for note in found["notes"]]
                else:
                    figures = _run_job(name, folder=Path(folder), is_toy=args.toy)
                    more["jobs"][name] = figures
                    notes.append(f"{name}: {_describe(figures)}")
                if name == "trace":
                    trace = max(Path(folder).glob("profile_traces/step-*/rank_0.json"))
                    more["top_operations"] = top = top_operations(trace)
                    parts = "; ".join(f"{each[:60]} {part:.1%}" for each, part in top)
                    notes.append(f"{name}, longest operations: {parts}")
            except subprocess.CalledProcessError as failed:
                error = failed.stderr.strip()[-600:]
                notes.append(f"{name}: failed with code {failed.returncode}: {error}")
    about["sizes"] = "toy" if args.toy else "real"
    return Report(about=about, comparisons=comparisons, notes=notes, more=more)


def fit(words: Sequence[str], *, is_toy: bool) -> list[str]:
    """Return the options for a toy without those that make it large or slow."""
    if not is_toy:
        return list(words)
    small = ["tiny" if word in COMPARISONS else word.replace("32768", "64") for word in words]
    if FLOAT8 in words:
        small.append("--quantize.linear.float8.emulate")
    if COMPILED in words and BUDGET not in words:  # the budget is inductor's
        small.append("--compile.backend=aot_eager")
    return [word for word in small if word != "--compile"]


def _compare(name: str, args: argparse.Namespace, *, folder: Path) -> dict[str, Any]:
    out = folder / "figures.json"
    _start(
        str(ROOT / "scripts" / "benchmark.py"),
        "train",
        "--apart",
        *fit(COMPARISONS[name], is_toy=args.toy),
        *(TOY_STEP if args.toy else REAL_STEP),
        *("--pairs", str(args.pairs), "--out", str(out)),
    )
    figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return figures


def _comparisons_in(figures: Mapping[str, Any], *, name: str) -> list[Comparison]:
    keys = ("target", "ours_s", "other_s", "amount", "unit")
    return [
        Comparison(f"{name}: {row['name']}", *(row[key] for key in keys))
        for row in figures["comparisons"]
    ]


def _run_job(name: str, *, folder: Path, is_toy: bool) -> dict[str, float]:
    _start(
        *("-m", "torchtitan.train"),
        f"--job.dump_folder={folder}",
        "--training.dataset=synthetic",
        "--training.mixed_precision_param=bfloat16",
        *(TOY_JOB if is_toy else REAL_JOB),
        *fit(JOBS[name], is_toy=is_toy),
    )
    return summarize(read_rows(folder / "metrics.jsonl"))


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """Return the highest peak memory, and medians over the counted rows; MFU if they have one."""
    counted = rows[NOT_COUNTED:]
    medians = {
        key: statistics.median(row[key] for row in counted)
        for key in ("tokens_per_second", "step_time_s", "mfu")
        if all(row[key] is not None for row in counted)
    }
    return medians | {"memory_peak_gib": max(row["memory_peak_gib"] for row in rows)}


def _describe(figures: Mapping[str, float]) -> str:
    mfu = f"MFU {figures['mfu']:.1f} %, " if "mfu" in figures else ""
    return (
        f"{figures['tokens_per_second']:,.0f} tokens/s, step {figures['step_time_s']:.4f} s, "
        f"{mfu}peak memory {figures['memory_peak_gib']:.2f} GiB"
    )


def top_operations(trace: Path, *, count: int = 3) -> list[tuple[str, float]]:
    """Return the operations of a profiler trace that take longest, each with its share.

    On a GPU the time of an operation is that of its kernels. On a CPU operations call each other,
    and the time of one excludes that of the operations it calls.
    """
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    spent: Counter[str] = Counter()
    for event in (event for event in spans if event.get("cat") == "kernel"):
        spent[event["name"]] += event["dur"]
    spent = spent or _own_times(event for event in spans if event.get("cat") == "cpu_op")
    total = sum(spent.values())
    return [(name, taken / total) for name, taken in spent.most_common(count)]


def _own_times(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    spent: Counter[str] = Counter()
    around: list[Mapping[str, Any]] = []

    def thread(event: Mapping[str, Any]) -> Any:
        return str(event["pid"]), str(event["tid"])

    # of two events with the same start, the longer one is outside
    for event in sorted(events, key=lambda e: (thread(e), e["ts"], -e["dur"])):
        while around and (
            thread(around[-1]) != thread(event)
            or around[-1]["ts"] + around[-1]["dur"] <= event["ts"]
        ):
            around.pop()
        spent[event["name"]] += event["dur"]
        if around:
            spent[around[-1]["name"]] -= event["dur"]
        around.append(event)
    return spent


def _start(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
