"""All figures of one GPU in one call: whether it computes right, speed, MFU, memory, operations.

    kernels    errors of each kernel against float64 (kernels.py)
    published  jobs that other projects have published figures of, which are printed beside ours
    layouts    a small job in every layout, on the GPUs that there are (layouts.py)
    jobs       jobs of Llama 3.2 1B, started as any job is: in float8, with experts, with 32k tokens
    CPU        largest differences of losses and gradient norms from the same jobs on the CPU, in
               float32: families, documents, chats, adapters, recomputed, compiled, offloaded ...
    resume     the same between a run and a repetition, and a resumed run: both must be 0

Published and other jobs are planned first (`torchtitan plan`), and have both figures.
Each runs in a process of its own, one after the other. One that fails is reported with its error,
and the rest continue. --out is written after each of them; called again with that file, the command
measures what it lacks or what failed. MFU is relative to the vendor's peak
(torchtitan/base/device.py). --toy uses sizes that run on a CPU, to test this command; its figures
mean nothing. --calibrate FILE measures the planner's constants instead (calibrate.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks import layouts
from scripts.benchmarks.calibrate import write_constants
from scripts.benchmarks.kernels import is_good
from scripts.benchmarks.pairs import Report, read_measured, write_json
from torchtitan.base.device import GIB, device_name, local_device
from torchtitan.base.errors import UserError
from torchtitan.metrics.rows import Row, read_rows
from torchtitan.tools.compare.layouts import FIGURES
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.devices import find_device
from torchtitan.tools.plan.job import plan_job
from torchtitan.tools.plan.ranks import rehearse_ranks
from torchtitan.tools.plan.step import time_step

ROOT = Path(__file__).parents[2]
SELECTIVE = "--activation_checkpoint.mode=selective"
OPTION = "--activation_checkpoint.selective_ac_option="
KEPT = "--activation_checkpoint.mode=none"
COMPILED = "--compile.enable"
FLOAT8 = "--model.converters=float8"
EXPERTS = ("--model.name=qwen3_moe", "--model.flavor=30B-A3B", "--model.num_layers=4")
LORA = ("--lora.rank=16", "--training.local_batch_size=2", "--training.global_batch_size=32", KEPT)
ALL_BFLOAT16 = (COMPILED, "--training.dtype=bfloat16", "--training.seq_len=4096")
SHORT = ("--training.steps=6", "--metrics.log_freq=1")
PUBLISHED: Mapping[str, tuple[float, str]] = {
    "8B LoRA": (12_473, "Automodel on an H100"),
    "7B LoRA": (14_110, "Automodel on an H100"),
    "8B": (10_471, "KempnerForge at 80.7 GB on an H200"),
}
"""Tokens/s of the same jobs, and who published them."""
JOBS: Mapping[str, tuple[str, ...]] = {
    "8B LoRA": (*SHORT, *ALL_BFLOAT16, "--model.flavor=8B", *LORA),
    "7B LoRA": (*SHORT, *ALL_BFLOAT16, "--model.name=qwen2", "--model.flavor=7B", *LORA),
    "8B": (
        *(*SHORT, *ALL_BFLOAT16, "--model.flavor=8B", "--activation_checkpoint.mode=full"),
        *("--training.local_batch_size=4", "--training.global_batch_size=8"),
    ),
    "bfloat16": (COMPILED, KEPT),
    "experts": (*EXPERTS, KEPT),
    "32k tokens": (SELECTIVE, f"{OPTION}op", "--training.seq_len=32768"),
    "3B by operator": ("--model.flavor=3B", SELECTIVE, f"{OPTION}op"),
    "float8": (COMPILED, KEPT, FLOAT8),
    "not compiled": (KEPT,),
}
REAL_JOB = (
    "--model.flavor=1B",
    "--model.tokenizer_path=bpe_2048",
    "--training.seq_len=8192",
    "--training.local_batch_size=1",
    "--training.mixed_precision_param=bfloat16",
    "--training.steps=30",
    "--metrics.log_freq=5",
)
TOY_JOB = (
    "--model.flavor=tiny",
    "--model.tokenizer_path=byte",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.mixed_precision_param=bfloat16",
    "--training.steps=5",
    "--metrics.log_freq=1",
)
SMALL_JOB = (
    "--model.flavor=debugmodel",
    "--model.tokenizer_path=byte",
    "--training.seq_len=256",
    "--training.local_batch_size=2",
    "--training.steps=6",
    "--lr_scheduler.warmup_steps=1",
    "--metrics.log_freq=1",
)
FLOAT32 = "--training.mixed_precision_param=float32"
"""Otherwise a job of either device computes in bfloat16 if it can."""
TOY_SIZES = ("--model.flavor=tiny", "--training.seq_len=32")
WITHIN = ("--training.attn_mask_type=block_causal", "--training.reset_positions=true")
DOCUMENTS = ("--training.dataset=python_stdlib", *WITHIN)
CHATS = ("--training.dataset=synthetic_examples", "--training.packing=packed", *WITHIN)
MOE = "--model.name=qwen3_moe"
BALANCED = (
    "--model.expert_bias=true",
    "--router.bias_update_rate=0.01",
    "--router.sequence_loss_weight=0.5",
    "--router.global_loss_weight=0.5",
    "--router.z_loss_weight=0.05",
)
WHAT: Mapping[str, tuple[str, ...]] = {
    "llama3": (),
    "mistral": ("--model.name=mistral",),
    "qwen3_moe": (MOE,),
    "deepseek_v3": ("--model.name=deepseek_v3",),
    "qwen2": ("--model.name=qwen2",),
    "qwen3": ("--model.name=qwen3",),
    "documents": DOCUMENTS,
    "experts and documents": (MOE, *DOCUMENTS),
    "chats": CHATS,
    "balanced experts": (MOE, *BALANCED),
    "adapter": ("--lora.rank=4",),
    "Muon": ("--optimizer.name=Muon", "--optimizer.lr=0.02"),
}
HOW: Mapping[str, tuple[str, ...]] = {
    "": (),
    "compiled": (COMPILED,),
    "by operator": (SELECTIVE, f"{OPTION}op"),
    "full": ("--activation_checkpoint.mode=full",),
    "offloaded": ("--training.enable_cpu_offload=true",),
    "foreach": ("--optimizer.implementation=foreach",),
    "accumulating": ("--training.local_batch_size=1", "--training.global_batch_size=2"),
}
COMPARED = (
    *((what, "") for what in WHAT),
    *(("llama3", how) for how in HOW if how),
    *((what, "compiled") for what in ("mistral", "qwen3_moe", "deepseek_v3", "documents")),
    ("qwen3_moe", "by operator"),
)
FEW_COMPARED = COMPARED[:4]
"""Of toys."""
AT_A_TIME = 8
REPEATED: Mapping[str, tuple[str, ...]] = {
    "float32": (FLOAT32,),
    "bfloat16": ("--training.mixed_precision_param=bfloat16",),
    "compiled": ("--training.mixed_precision_param=bfloat16", COMPILED),
    "experts": (MOE, "--training.mixed_precision_param=bfloat16"),
    "FSDP, offloaded": (FLOAT32, "--training.enable_cpu_offload=true"),
}
"""Offloading is what shards the model on one rank too."""
EXACT = (
    "--debug.deterministic=true",
    "--checkpoint.enable=true",
    "--checkpoint.interval=3",
    "--checkpoint.mode=recover",
)
FEW = {"OMP_NUM_THREADS": "4"}
"""Threads of a job on the CPU, since several run at a time."""
NAMES = (
    "kernels",
    *PUBLISHED,
    "layouts",
    *(n for n in JOBS if n not in PUBLISHED),
    "CPU",
    "resume",
)
"""What is measured, in the order of its worth."""
NOT_COUNTED = 2
"""Rows of the first steps, which compile and allocate memory."""

Figures = dict[str, Any]
Start = Callable[..., None]
"""Runs a Python command until the deadline."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--toy", action="store_true", help="sizes that run on a CPU")
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="write the planner's constants to FILE"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        metavar="NAME",
        help=f"measure only these of {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--budget_s",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="end then, also within a measurement; --out keeps those that ended",
    )


def measure(args: argparse.Namespace) -> Report:
    """Run one measurement after the other, and report those that fail."""
    device = local_device(0)
    about = {"device": device_name(device), "torch": torch.__version__}
    if args.calibrate is not None:
        found = write_constants(args.calibrate, device=device, is_toy=args.toy)
        notes = [f"{name}: {value}" for name, value in found.items()]
        return Report(about=about, comparisons=[], notes=notes, more=found)
    about["sizes"] = "toy" if args.toy else "real"
    measured = read_measured(args.out, about=about)
    deadline = time.monotonic() + args.budget_s
    for name in args.only:
        if "failed" not in measured.get(name, {"failed": ""}):
            continue
        if time.monotonic() >= deadline:
            break
        begin = time.monotonic()
        sys.stderr.write(f"measuring {name}\n")
        with tempfile.TemporaryDirectory() as folder:
            try:
                before = measured.get(name, {})
                found = _measure(name, args, before, folder=Path(folder), deadline=deadline)
            except subprocess.CalledProcessError as failed:
                found = {"failed": _reason(failed)}
            except subprocess.TimeoutExpired:
                found = {"failed": "did not end within --budget_s"}
        measured[name] = found | {"seconds": time.monotonic() - begin}
        report = _report(about, measured)
        if args.out is not None:
            write_json(report, args.out)
        sys.stderr.write(f"{name}: {_describe(found)}\n")
    return _report(about, measured)


def _reason(failed: subprocess.CalledProcessError) -> str:
    return f"code {failed.returncode}: {failed.stderr.strip()[-600:]}"


def _measure(
    name: str, args: argparse.Namespace, before: Figures, *, folder: Path, deadline: float
) -> Figures:
    """Measure one of `NAMES`; `before`: its figures of an earlier call, which failed."""
    start = partial(_start, deadline=deadline)
    if name == "kernels":
        out = folder / "errors.json"
        start("-m", "scripts.benchmarks.kernels", "--out", str(out))
        return {"errors": json.loads(out.read_text(encoding="utf-8"))}
    if name == "layouts":
        return _train_layouts(before.get("rows", {}), is_toy=args.toy, deadline=deadline)
    if name == "CPU":
        return _compare_with_cpu(start, folder=folder, is_toy=args.toy)
    if name == "resume":
        return {"gaps": _repeat_and_resume(start, folder=folder, is_toy=args.toy)}
    job = (*(TOY_JOB if args.toy else REAL_JOB), *fit(JOBS[name], is_toy=args.toy))
    figures: Figures = {"planned": plan(job, product="H100" if args.toy else None)}
    sys.stderr.write(f"planned {name}: {figures['planned']}\n")
    try:
        figures |= summarize(_rows_of(start, *job, folder=folder))
    except subprocess.CalledProcessError as failed:
        return figures | {"failed": _reason(failed)}
    if name in PUBLISHED:
        figures["published"] = dict(zip(("tokens_per_second", "by"), PUBLISHED[name], strict=True))
    return figures


def _train_layouts(rows: Mapping[str, Figures], *, is_toy: bool, deadline: float) -> Figures:
    """Return the rows of layouts.py, and which of them failed or are missing."""
    names = [*layouts.ROWS][: 1 if is_toy else None]
    rows = dict(rows) | dict(layouts.train_rows(names, rows, dtype="float32", deadline=deadline))
    bad = [
        f"{name}: {layouts.describe(rows[name]) if name in rows else 'not trained'}"
        for name in names
        if rows.get(name, {}).get("verdict") != layouts.PASSED
    ]
    return {"rows": rows, **({"failed": "; ".join(bad)} if bad else {})}


def plan(job: Sequence[str], *, product: str | None) -> Figures:
    """Return the planned bounds of a job's step in seconds and its memory in GiB, or the error.

    `product` is the name of a GPU; None: this machine's.
    """
    try:
        device = find_device(product or device_name(local_device(0)), memory_gib=None)
        planned = plan_job(job, world_size=1, device=device, gpus_per_node=1)
        records = rehearse_ranks(planned, validates=False)
        step, account = time_step(planned, records), replay(records[0])
    except (UserError, RuntimeError) as error:  # the job is trained all the same
        return {"failed": repr(error)}
    return {
        "step_time_s": [step.best, step.worst],
        "memory_peak_gib": account.active / GIB,
        "fits": account.needed <= device.memory,
    }


def _report(about: Mapping[str, str], measured: Mapping[str, Figures]) -> Report:
    notes = [f"{name}: {_describe(found)}" for name, found in measured.items()]
    return Report(about=about, comparisons=[], notes=notes, more={"measured": measured})


def fit(words: Sequence[str], *, is_toy: bool) -> list[str]:
    """Return the options for a toy without those that make it large or slow."""
    if not is_toy:
        return list(words)
    small = [
        "--model.flavor=tiny" if word.startswith("--model.flavor=") else word
        for word in words
        if not word.startswith("--model.num_layers=")
    ]
    small = [re.sub("=(4096|32768)$", "=64", word) for word in small]
    if FLOAT8 in words:
        small.append("--quantize.linear.float8.emulate")
    if COMPILED in words:
        small.append("--compile.backend=aot_eager")
    return small


def _rows_of(start: Start, *job: str, folder: Path, **environment: str) -> list[Row]:
    """Run a job and return its rows."""
    words = (f"--job.dump_folder={folder}", "--training.dataset=synthetic", *job)
    start("-m", "torchtitan.train", *words, **environment)
    return list(read_rows(folder / "metrics.jsonl"))


def _compare_with_cpu(start: Start, *, folder: Path, is_toy: bool) -> Figures:
    """Return the largest gaps between jobs on this device and on the CPU, in float32, and the
    errors of jobs that fail."""
    compared = FEW_COMPARED if is_toy else COMPARED

    def run(what: str, how: str, **environment: str) -> list[Row]:
        job = [*SMALL_JOB, FLOAT32, *(TOY_SIZES if is_toy else ()), *WHAT[what], *HOW[how]]
        place = "cpu" if environment else "here"
        return _rows_of(start, *job, folder=folder / what / how / place, **environment)

    with ThreadPoolExecutor(AT_A_TIME) as pool:  # nothing is timed
        there = {
            what: pool.submit(run, what, "", CUDA_VISIBLE_DEVICES="", **FEW)
            for what in dict(compared)
        }
        here = {pair: pool.submit(run, *pair) for pair in compared}
        gaps, errors = {}, []
        for pair in compared:
            name = " ".join(pair).strip()
            try:
                gaps[name] = largest_gap(here[pair].result(), there[pair[0]].result())
            except subprocess.CalledProcessError as failed:  # keep the results of the others
                errors.append(f"{name}: {_reason(failed)}")
        return {"gaps": gaps, **({"failed": "; ".join(errors)} if errors else {})}


def _repeat_and_resume(start: Start, *, folder: Path, is_toy: bool) -> dict[str, float]:
    """Return the largest gaps between a run, the same again, and one resumed at half its steps."""

    def gaps(name: str) -> dict[str, float]:
        job = [*SMALL_JOB, *(TOY_SIZES if is_toy else ()), *REPEATED[name], *EXACT]
        if is_toy and COMPILED in job:
            job.append("--compile.backend=aot_eager")
        once = _rows_of(start, *job, folder=folder / name / "once")
        again = _rows_of(start, *job, folder=folder / name / "again")
        shutil.rmtree(folder / name / "again" / "checkpoint" / f"step-{len(again)}")
        resumed = _rows_of(start, *job, folder=folder / name / "again")
        half = len(once) // 2
        return {
            f"{name}, again": largest_gap(once, again),
            f"{name}, resumed": largest_gap(once[half:], resumed[-half:]),
        }

    with ThreadPoolExecutor(len(REPEATED)) as pool:
        found = list(pool.map(gaps, REPEATED))
    return {name: gap for each in found for name, gap in each.items()}


def largest_gap(one: Sequence[Row], other: Sequence[Row]) -> float:
    """Return the largest relative difference of losses and gradient norms, step by step."""
    return max(
        abs(a[key] - b[key]) / abs(b[key])
        for a, b in zip(one, other, strict=True)
        for key in ("loss", "grad_norm")
    )


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """Return the highest peak memory, and medians over the counted rows; MFU if they have one."""
    counted = rows[NOT_COUNTED:]
    medians = {
        key: statistics.median(row[key] for row in counted)
        for key in ("tokens_per_second", "step_time_s", "mfu")
        if all(row[key] is not None for row in counted)
    }
    return medians | {"memory_peak_gib": max(row["memory_peak_gib"] for row in rows)}


def _describe(figures: Figures) -> str:
    """Return one measurement in a line."""
    if "failed" in figures:
        return f"failed with {figures['failed']}{_describe_plan(figures)}"
    if "rows" in figures:
        largest = {
            key: max(row.get(key, 0.0) for row in figures["rows"].values()) for key in FIGURES
        }
        gaps = ", ".join(f"{key} {gap:.1e}" for key, gap in largest.items())
        return f"{len(figures['rows'])} layouts trained the same, largest differences: {gaps}"
    if "errors" in figures:
        bad = [
            f"{name} {row['error']:.1e}"
            for name, row in figures["errors"].items()
            if not is_good(row)
        ]
        return f"{len(figures['errors'])} checked, above their bounds: {', '.join(bad) or 'none'}"
    if "gaps" in figures:
        return ", ".join(f"{name} {gap:.1e}" for name, gap in figures["gaps"].items())
    mfu = f"MFU {figures['mfu']:.1f} %, " if "mfu" in figures else ""
    text = (
        f"{figures['tokens_per_second']:,.0f} tokens/s, step {figures['step_time_s']:.4f} s, "
        f"{mfu}peak memory {figures['memory_peak_gib']:.2f} GiB{_describe_plan(figures)}"
    )
    if published := figures.get("published"):
        text += f"; published: {published['tokens_per_second']:,} tokens/s, {published['by']}"
    return text


def _describe_plan(figures: Figures) -> str:
    planned = figures.get("planned", {"failed": "no plan"})
    if "failed" in planned:
        return f"; not planned: {planned['failed']}"
    best, worst = planned["step_time_s"]
    verdict = "" if planned["fits"] else ", which does not fit"
    return f"; planned {best:.3g} to {worst:.3g} s, {planned['memory_peak_gib']:.2f} GiB{verdict}"


def _start(*arguments: str, deadline: float, **environment: str) -> None:
    subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=None if deadline == float("inf") else max(1.0, deadline - time.monotonic()),
        env={"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ, **environment},
    )
