"""Whether a small job trains the same in every layout: as `torchtitan compare layouts`, and faults.

Each row trains on 2 to 4 ranks and is compared with one process, by `torchtitan compare layouts`:
loss and gradient norm per step, gradients and weights by tensor. Rows with "then" kill all ranks by
SIGKILL after the checkpoint of step 2, and resume in another layout. In the last row a rank is
stopped by SIGSTOP: the job must end by itself, and `torchtitan hang` must name that rank.

Ranks have a GPU each, or share the GPUs if there are fewer (`torchtitan/tools/compare/rank.py`).
Without a GPU they talk over gloo: a rehearsal. --out is written after each row; called again with
that file, the command trains the rows that it lacks or that failed. Exit code 1: a row failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.pairs import Report, read_measured, write_json
from torchtitan.base.device import device_name, local_device
from torchtitan.data.prepare import num_cores
from torchtitan.tools.compare.layouts import (
    FIGURES,
    SHARED,
    Plan,
    Result,
    compare_results,
    make_plans,
    train_layout,
)

ROOT = Path(__file__).parents[2]
SAVED_STEP, NUM_STEPS, STOPPED_RANK = 2, 4, 1
JOB = (
    f"--job.config_file={ROOT / 'train_configs' / 'compare_layouts.toml'}",
    *SHARED,
    f"--training.steps={NUM_STEPS}",
    f"--checkpoint.interval={SAVED_STEP}",
    "--training.local_batch_size=4",
)
LIMIT_S = 180
"""Seconds of a row that hangs."""
CORES_PER_ROW = 4
BOUNDS: Mapping[str, Mapping[str, float]] = {
    "float32": {"loss": 1e-5, "grad_norm": 1e-5, "gradients": 1e-4, "weights": 1e-2},
    "bfloat16": {"loss": 2e-3, "grad_norm": 5e-3, "gradients": 1.0, "weights": 1.0},
}
"""Allowed relative differences. In bfloat16 one operation rounds by up to 2e-3. Over the tokens of
a batch that averages out: on a CPU at most 3e-5 in the loss and 3e-4 in the norm, and 6e-4 and
1.2e-3 where compiled blocks round less often. Rounding also chooses other experts, so that the
gradient of a router differs by 0.6 (other tensors: 0.02): bounds of tensors only find a wrong sign
or a missing part."""
MOE = ("--model.name=qwen3_moe",)
DOCUMENTS = (
    "--training.dataset=synthetic_examples",
    "--training.packing=packed",
    "--training.attn_mask_type=block_causal",
    "--training.reset_positions=true",
)
CALLBACK = "--training.callbacks=scripts.benchmarks.layouts:"
STOPPED = (f"{CALLBACK}Stopped", "--comm.train_timeout_seconds=10")
ASYNC = "async_with_pinned_mem" if torch.cuda.is_available() else "async"
SCHEDULE = "--parallelism.pipeline_parallel_schedule="
ROTATE = "--parallelism.context_parallel_rotate_method="


@dataclass(frozen=True)
class Trial:
    """A layout, and what happens to its ranks."""

    layout: str
    job: tuple[str, ...] = ()
    """Settings, also of the reference."""
    options: tuple[str, ...] = ()
    """Settings that `compare layouts` refuses in a layout."""
    resumed: str = ""
    """Layout in which the job resumes after all ranks are killed."""


ROWS: Mapping[str, Trial] = {
    "fsdp2": Trial("fsdp2"),
    "tp2": Trial("tp2"),
    "pp2 1F1B": Trial("pp2"),
    "cp2 ring": Trial(f"cp2 {ROTATE}alltoall"),
    "fsdp2 ep2": Trial("fsdp2,ep2", job=MOE),
    "fsdp2 then tp2": Trial("fsdp2", resumed="tp2"),
    "fsdp2, a rank stopped": Trial("fsdp2", options=STOPPED),
    "fsdp2 tp2": Trial("fsdp2,tp2"),
    "fsdp2 pp2 ZBV": Trial(f"fsdp2,pp2 {SCHEDULE}ZBVZeroBubble"),
    "cp2 allgather, documents": Trial(f"cp2 {ROTATE}allgather", job=DOCUMENTS),
    "cp2 Ulysses, documents": Trial(f"cp2 {ROTATE}ulysses", job=DOCUMENTS),
    "hsdp2x2": Trial("hsdp2x2"),
    "pp2 tp2": Trial("pp2,tp2"),
    "pp2 Interleaved1F1B": Trial(f"pp2 {SCHEDULE}Interleaved1F1B"),
    "pp2 DualPipeV": Trial(f"pp2 {SCHEDULE}DualPipeV"),
    "tp2 without sequence parallel": Trial("tp2 --parallelism.enable_sequence_parallel=false"),
    "fsdp2, offloaded": Trial("fsdp2 --training.enable_cpu_offload=true"),
    "fsdp2, compiled": Trial("fsdp2 --compile.enable"),
    "fsdp2, asynchronous saves": Trial("fsdp2", options=(f"--checkpoint.async_mode={ASYNC}",)),
    "ddp2": Trial("ddp2"),
    "tp2 ep2": Trial("tp2,ep2", job=MOE),
    "cp2 fsdp2 ring": Trial(f"cp2,fsdp2 {ROTATE}alltoall"),
    "pp2 then fsdp2 tp2": Trial("pp2", resumed="fsdp2,tp2"),
    "fsdp2 ep2 then tp2": Trial("fsdp2,ep2", job=MOE, resumed="tp2"),
}
"""By worth, since --budget_s may end before the last."""
Figures = dict[str, Any]
PASSED = "same"


class Killed:
    """Callback that kills its rank once a checkpoint is saved."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Kill this process after step `SAVED_STEP`."""
        if step == SAVED_STEP:
            os.kill(os.getpid(), signal.SIGKILL)


class Stopped:
    """Callback that stops a rank without an end."""

    def on_step(self, step: int, row: Mapping[str, object] | None) -> None:
        """Stop this process after step `SAVED_STEP`."""
        if step == SAVED_STEP and os.environ["RANK"] == str(STOPPED_RANK):
            os.kill(os.getpid(), signal.SIGSTOP)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add, text = parser.add_argument, f"train only these of: {', '.join(ROWS)}"
    add("--only", nargs="+", choices=ROWS, default=[*ROWS], metavar="NAME", help=text)
    add("--dtype", choices=BOUNDS, default="float32", help="computation (float32)")
    text = "end then; --out keeps the rows that ended"
    add("--budget_s", type=float, default=float("inf"), metavar="SECONDS", help=text)


def measure(args: argparse.Namespace) -> Report:
    """Train the rows that --out lacks, and report all."""
    about = {
        "device": device_name(local_device(0)),
        "torch": torch.__version__,
        "GPUs": torch.cuda.device_count(),
        "NCCL": str(torch.cuda.nccl.version()) if torch.cuda.is_available() else "none (gloo)",
        "dtype": args.dtype,
    }
    rows, deadline = read_measured(args.out, about=about), time.monotonic() + args.budget_s
    for name, row in train_rows(args.only, rows, dtype=args.dtype, deadline=deadline):
        rows[name] = row
        sys.stderr.write(f"{name}: {describe(row)}\n")
        if args.out is not None:
            write_json(_report(rows, names=args.only, about=about), args.out)
    return _report(rows, names=args.only, about=about)


def _report(rows: Figures, *, names: Iterable[str], about: Mapping[str, Any]) -> Report:
    notes = [f"{n}: {describe(rows[n]) if n in rows else 'not trained yet'}" for n in names]
    failed = any(name in rows and rows[name]["verdict"] != PASSED for name in names)
    more = {"measured": rows}
    return Report(about=about, comparisons=[], notes=notes, more=more, has_failed=failed)


def train_rows(
    names: Iterable[str], rows: Mapping[str, Figures], *, dtype: str, deadline: float
) -> Iterator[tuple[str, Figures]]:
    """Train the named rows that `rows` lacks or has as failed, several at a time on many cores, and
    yield each when it ends. At `deadline`, in seconds of `time.monotonic`, the rest is left out."""
    names = [name for name in names if rows.get(name, {}).get("verdict") != PASSED]
    plans: dict[str, list[Plan]] = {}
    for name in names:
        layouts = ["single", ROWS[name].layout, *filter(None, [ROWS[name].resumed])]
        common = (*JOB, *ROWS[name].job, f"--training.mixed_precision_param={dtype}")
        plans[name] = make_plans(layouts, common=common)
    settings = {f"{key}_tolerance": bound for key, bound in BOUNDS[dtype].items()}
    settings |= {"steps": NUM_STEPS, "gradient_steps": NUM_STEPS, "float64": False}

    def train(plan: Plan, *words: str, folder: Path) -> Result:
        timeout = max(1.0, min(LIMIT_S, deadline - time.monotonic()))
        options = argparse.Namespace(**settings, timeout=timeout)
        return train_layout((plan[0], (*plan[1], *words)), folder=folder, options=options)

    def run(name: str, reference: Future[Result], *, folder: Path) -> Figures | None:
        if (begin := time.monotonic()) >= deadline:
            return None
        _, plan, *resumed = plans[name]
        killed = [f"{CALLBACK}Killed"] if resumed else []
        result = train(plan, *ROWS[name].options, *killed, folder=folder)
        if resumed and not (problem := _unexpected(result, "SIGKILL")):
            result = train(resumed[0], folder=folder)
            log = (folder / "output.txt").read_text(encoding="utf-8")
            problem = result.problem or ("" if "Resumed from" in log else "it did not resume")
        if resumed:
            result.problem = problem
        if ROWS[name].options == STOPPED:
            result.problem = _unexpected(result, "exit code 4") or _hang_problem(result.folder)
        elif not result.problem and not reference.result().problem:
            compare_results(result, reference.result(), options=argparse.Namespace(**settings))
        elif not result.problem:
            result.problem = f"the reference {reference.result().problem}"
        if time.monotonic() >= deadline:  # which may have ended the ranks
            return None
        return {
            "verdict": PASSED if result.verdict == "reference" else result.verdict,
            "seconds": time.monotonic() - begin,
            "problem": result.problem,
            "differences": [text for _, text in result.differences],
            **result.figures,
        }

    pool = ThreadPoolExecutor(max(1, num_cores() // CORES_PER_ROW))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            jobs = {ROWS[name].job: name for name in names}
            references = {
                job: pool.submit(train, plans[name][0], folder=folder / f"reference of {name}")
                for job, name in jobs.items()
            }
            waiting = {
                pool.submit(run, name, references[ROWS[name].job], folder=folder / name): name
                for name in names
            }
            for future in as_completed(waiting):
                if (row := future.result()) is not None:
                    yield waiting[future], row
        finally:
            pool.shutdown(cancel_futures=True)


def _unexpected(result: Result, end: str) -> str:
    """Return the problem that a training ended otherwise, or ""."""
    text = result.problem or "ended with exit code 0"
    return "" if end in text else f"must end with {end}, but {text}"


def _hang_problem(run: Path) -> str:
    """Return the problem that `torchtitan hang` does not name the stopped rank, or ""."""
    command = [sys.executable, "-m", "torchtitan", "hang", str(run)]
    hang = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    is_named = f"for rank {STOPPED_RANK}" in hang.stdout
    return "" if is_named else f"torchtitan hang does not name rank {STOPPED_RANK}: {hang}"


def describe(row: Figures) -> str:
    """Return a row in a line."""
    figures = [f"{key} {row[key]:.1e}" for key in FIGURES if key in row]
    why = row["problem"] or "; ".join(row["differences"])
    text = ", ".join([row["verdict"], *figures, f"{row['seconds']:.0f} s"])
    return f"{text}: {why}" if why else text
