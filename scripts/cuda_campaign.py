"""Run every kind of job for three steps on a CUDA device, and watch the second one.

    python scripts/cuda_campaign.py --out campaign.json

For each job: its exit code; launched kernels; waits of the host, with their lines; blocks compiled
again after the first step; the allocator's peak. Jobs of 8B and more have the planner's peak beside
it, and run where that fits the device. The file is written after each job; the same command
continues it. Exit code 0 if all jobs that fit exited with 0, else 1.

A job runs on NCCL if each rank has a device. Otherwise one process is rank 0 of a world without
other ranks (torch's `fake` process group): it launches, waits and allocates as in the job, and its
losses mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # works without being installed

import torch
import torch._dynamo.utils
import torch.distributed as dist

from scripts.benchmarks.pairs import Report, show, write_json
from torchtitan.base.device import GIB, device_name
from torchtitan.base.errors import UserError
from torchtitan.tools.compare.launch import SECONDS_TO_SAVE, end
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.devices import Device, find_device
from torchtitan.tools.plan.job import plan_job
from torchtitan.tools.plan.ranks import rehearse_ranks
from torchtitan.tools.plan.world import load_evenly, replaced
from torchtitan.train import main_and_exit
from torchtitan.trainer import Run

COUNTER = "LAUNCH_COUNTER"
"""Variable with the import path, module:function, of a count of all launches so far. Without it the
profiler counts, which needs CUPTI."""
WATCHED = "watched.json"
DP, COPIES = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
TP, EP = "parallelism.tensor_parallel_degree", "parallelism.expert_parallel_degree"
CP, BY = "parallelism.context_parallel_degree", "parallelism.context_parallel_rotate_method"
PP, TABLE = "parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_schedule"
AC = "activation_checkpoint.mode"
OP = f"{AC}=selective activation_checkpoint.selective_ac_option=op"
MOE, MLA, FLOAT8 = "model.name=qwen3_moe", "model.name=deepseek_v3", "model.converters=float8"
MUON, COMPILED = "optimizer.name=Muon", "compile.enable=true"
SMALL = f"model.flavor=debugmodel training.seq_len=256 training.local_batch_size=4 {AC}=none"
STAGES = f"{PP}=2 parallelism.pipeline_parallel_microbatch_size=1 model.num_layers=4 {TABLE}"
LARGE = f"training.seq_len=8192 training.local_batch_size=1 {AC}=none model.flavor"
COMMON = (
    "model.tokenizer_path=byte training.dataset=synthetic lr_scheduler.warmup_steps=1 "
    "training.mixed_precision_param=bfloat16 training.steps=3 metrics.log_freq=1000 "
    "training.callbacks=scripts.cuda_campaign:Watch"
)
SMALL_JOBS: Mapping[str, tuple[int, str]] = {
    "plain": (1, ""),
    "float32": (1, "training.mixed_precision_param=float32"),
    "accumulating": (1, "training.global_batch_size=8"),
    "full": (1, f"{AC}=full"),
    "by operator": (1, OP),
    "foreach": (1, "optimizer.implementation=foreach"),
    "Muon": (1, MUON),
    "documents": (1, "training.dataset=python_stdlib training.attn_mask_type=block_causal"),
    "windows": (1, "model.name=mistral"),
    "adapter": (1, "lora.rank=4"),
    "float8": (1, FLOAT8),
    "experts": (1, MOE),
    "MLA": (1, MLA),
    "compiled": (1, COMPILED),
    "fsdp": (4, ""),
    "hsdp": (4, f"{COPIES}=2"),
    "ddp": (4, f"{COPIES}=4 {DP}=1"),
    "tp": (4, f"{TP}=2"),
    "tp without sp": (4, f"{TP}=2 parallelism.enable_sequence_parallel=false"),
    "cp ring": (4, f"{CP}=2 {BY}=alltoall"),
    "cp all-gather": (4, f"{CP}=2 {BY}=allgather"),
    "cp Ulysses": (4, f"{CP}=2 {BY}=ulysses"),
    "1F1B": (4, f"{STAGES}=1F1B"),
    "ZBV": (4, f"{STAGES}=ZBVZeroBubble"),
    "DualPipeV": (4, f"{STAGES}=DualPipeV"),
    "offloaded": (4, "training.enable_cpu_offload=true"),
    "fsdp Muon": (4, MUON),
    "fsdp float8": (4, FLOAT8),
    "fsdp compiled": (4, COMPILED),
    "tp compiled": (4, f"{COMPILED} {TP}=2"),
    "fsdp experts": (4, MOE),
    "ep": (4, f"{MOE} {EP}=2"),
    "ep MLA": (4, f"{MLA} {EP}=4"),
}
LARGE_JOBS: Mapping[str, tuple[int, str]] = {
    "8B, fsdp8": (8, "8B"),
    "8B, fsdp8, by operator": (8, f"8B {OP}"),
    "8B, fsdp8, full": (8, f"8B {AC}=full"),
    "8B, fsdp2 tp4": (8, f"8B {TP}=4"),
    "8B, fsdp2 cp4, 32k": (8, f"8B training.seq_len=32768 {CP}=4"),
    "30B-A3B, fsdp32 ep8, full": (32, f"30B-A3B {MOE} {EP}=8 {AC}=full"),
    "70B, fsdp64, full": (64, f"70B {AC}=full"),
    "70B, fsdp8 tp8, by operator": (64, f"70B {OP} {TP}=8"),
}
JOBS: Mapping[str, tuple[int, list[str]]] = {
    name: (ranks, [f"--{word}" for word in f"{COMMON} {common}{options}".split()])
    for common, jobs in ((f"{SMALL} ", SMALL_JOBS), (f"{LARGE}=", LARGE_JOBS))
    for name, (ranks, options) in jobs.items()
}
Figures = dict[str, Any]


class Watch:
    """A callback that watches the second step."""

    def __init__(self) -> None:
        module, _, name = os.environ.get(COUNTER, "").partition(":")
        self._count = getattr(import_module(module), name) if module else None
        self._waits: Counter[str] = Counter()

    def on_start(self, run: Run) -> None:
        """Without other ranks, give experts equal numbers of tokens."""
        self._file, self._rank = run.folder / WATCHED, dist.get_rank()
        if dist.get_world_size() > 1 and dist.get_backend() == "fake":
            for part in run.model:
                load_evenly(part, dtype=torch.bfloat16)

    def on_step(self, step: int, row: object) -> None:
        """Start after the first step, end after the second."""
        if step == 1:
            self._start()
        elif step == 2:
            self._end()

    def _start(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = _num_compiled(), self._count() if self._count else 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        if self._count is None:
            self._profile.start()
        wait = torch.cuda.Event.synchronize

        def waited(event: torch.cuda.Event) -> None:
            self._waits[f"{our_line(traceback.extract_stack())} (event)"] += 1
            wait(event)

        def warned(message: Warning | str, *_: Any, **__: Any) -> None:
            if "called a synchronizing CUDA operation" in str(message):
                self._waits[our_line(traceback.extract_stack())] += 1

        self._undo = ExitStack()
        self._undo.enter_context(replaced(torch.cuda.Event, "synchronize", waited))
        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        warnings.showwarning = warned

    def _end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._undo.close()
        if self._count is None:
            self._profile.stop()
            launches = count_launches(event.name for event in self._profile.events() or ())
        else:
            launches = self._count() - self._before[1]
        figures = {
            "launches": launches,
            "waits": dict(self._waits),
            "recompiles": _num_compiled() - self._before[0],
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        }
        if self._rank == 0:
            self._file.write_text(json.dumps(figures), encoding="utf-8")


def count_launches(names: Iterable[str]) -> int:
    """Return how many events of a profile launch a kernel."""
    return sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)


def our_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of the library, or else of torch."""
    ours = [frame for frame in stack if f"{ROOT}/torchtitan/" in frame.filename]
    others = [frame for frame in stack if frame.filename != __file__]
    line = (ours or others)[-1]
    return f"{'/'.join(Path(line.filename).parts[-2:])}:{line.lineno}"


def _num_compiled() -> int:
    return int(torch._dynamo.utils.counters["frames"]["total"])


def train_alone() -> None:
    """Train as rank 0 of WORLD_SIZE ranks, the others of which do not exist."""
    init, new_group, store = dist.init_process_group, dist.new_group, dist.HashStore()
    dist.init_process_group = lambda _, **kw: init("fake", **kw | {"store": store})
    dist.new_group = lambda *args, **kw: new_group(*args, **kw | {"backend": "fake"})
    dist.set_timeout = lambda *_: None  # a fake group has none
    main_and_exit(sys.argv[1:])


def run_job(name: str, *, folder: Path, is_alone: bool, seconds: float) -> Figures:
    """Run a job and return its exit code, seconds, and figures or the end of its log."""
    ranks, words = JOBS[name]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    start = f"-m torchtitan.launch --standalone --nproc_per_node {ranks} -m torchtitan.train"
    command = start.split()
    if is_alone:
        command = ["-c", "from scripts.cuda_campaign import train_alone; train_alone()"]
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # not used
    command = [sys.executable, *command, *words, f"--job.dump_folder={folder}"]
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SECONDS_TO_SAVE)
    output, begin = folder.with_suffix(".log"), time.monotonic()
    with output.open("wb") as file:
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        try:
            code, log = job.wait(seconds), ""
        except subprocess.TimeoutExpired:
            code, log = -1, "did not end within --seconds"
        finally:
            end(job)
    figures: Figures = {"exit": code, "seconds": time.monotonic() - begin}
    if code:
        log = log or output.read_text(encoding="utf-8", errors="replace").strip()[-600:]
        return figures | {"error": log}
    return figures | json.loads((folder / WATCHED).read_text(encoding="utf-8"))


def plan_job_memory(name: str, *, device: Device) -> Figures:
    """Return the planned peak of the fullest pipeline rank and what it needs in all, in GiB."""
    ranks, words = JOBS[name]
    planned = plan_job(words, world_size=ranks, device=device, gpus_per_node=8)
    accounts = [replay(record) for record in rehearse_ranks(planned)]
    needed = max(account.needed for account in accounts)
    return {"planned_gib": max(a.active for a in accounts) / GIB, "needed_gib": needed / GIB}


def table_of(jobs: Mapping[str, Figures]) -> list[list[str]]:
    """Return the names of the columns and a row for each job."""
    rows = [["", "exit", "s", "launches", "waits", "recompiles", "peak, GiB", "planned"]]
    for name, found in jobs.items():
        sums = {"waits": sum(found["waits"].values())} if "waits" in found else {}
        cells = {"exit": "not run"} | found | sums
        keys = ("exit", "seconds", "launches", "waits", "recompiles", "peak_gib", "planned_gib")
        texts = [cells.get(key, "") for key in keys]
        rows.append([name, *(f"{x:.2f}" if isinstance(x, float) else str(x) for x in texts)])
    return rows


def notes_of(jobs: Mapping[str, Figures]) -> list[str]:
    """Return each line that waits with the waits of each job, then the errors."""
    lines: dict[str, list[str]] = {}
    for name, found in jobs.items():
        for line, number in found.get("waits", {}).items():
            lines.setdefault(line, []).append(f"{name} {number}")
    errors = [f"{name}: {found['error']}" for name, found in jobs.items() if "error" in found]
    return [*(f"{line}: {', '.join(names)}" for line, names in sorted(lines.items())), *errors]


def measure(name: str, args: argparse.Namespace) -> Figures:
    """Plan a large job, and run it if it fits."""
    device, found = torch.device("cuda"), Figures()
    if name in LARGE_JOBS:
        try:
            planned = find_device(device_name(device), memory_gib=None)
            found = plan_job_memory(name, device=planned)
        except UserError as error:
            return {"error": str(error)}
        if found["needed_gib"] * GIB > torch.cuda.mem_get_info()[1]:
            return found
    is_alone = args.alone or torch.cuda.device_count() < JOBS[name][0]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        return found | run_job(name, folder=run, is_alone=is_alone, seconds=args.seconds)


def main(argv: Sequence[str]) -> int:
    """Run the jobs that --out lacks, and print the table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="JOB")
    parser.add_argument("--alone", action="store_true", help="do not use NCCL")
    parser.add_argument("--seconds", type=float, default=600, help="longest time of a job")
    args = parser.parse_args(argv)
    about = {"device": device_name(torch.device("cuda")), "torch": torch.__version__}
    jobs: dict[str, Figures] = {}
    if args.out.exists():
        jobs = json.loads(args.out.read_text(encoding="utf-8"))["jobs"]
    for name in args.only:
        if jobs.get(name, {}).get("exit") != 0:
            jobs[name] = measure(name, args)
            write_json(Report(about=about, comparisons=[], more={"jobs": jobs}), args.out)
            sys.stderr.write(f"{name}: {jobs[name].get('exit', 'not run')}\n")
    show(Report(about=about, comparisons=[], notes=notes_of(jobs), tables={"": table_of(jobs)}))
    return int(any("error" in found for found in jobs.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
