"""What ranks ask of the file system, counted by strace: the same on every machine.

A job of each number of `--ranks` is started, saves, is started again, saves, and removes the older
checkpoint. Its text was tokenised before. strace counts what each process asks for in the job's
folders: files opened, looked at (stat), listed and changed (made, renamed, removed); reading and
writing of what is open is not counted.

For each kind of work the table has the calls of rank 0, the most that any other rank makes, and
what both would be with `--world` ranks: on the line through the two largest numbers of ranks, with
a whole number of calls per rank. That is exact where the work is a constant, or so much per rank.
Checksums are compared by all ranks, each its share, so that `read` falls with more ranks and varies
with who has which files.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from scripts.benchmarks.pairs import Report
from scripts.ports import hold_port
from torchtitan.base.errors import ConfigError

SUMMARY = "what ranks ask of the file system at a start, a save and a resume"
ROOT = Path(__file__).parents[2]
SECONDS = 280
JOB = """
[model]
flavor = "tiny"
tokenizer_path = "byte"
[training]
dataset = "files"
seq_len = 32
local_batch_size = 1
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 1
total_steps = 100
[metrics]
log_freq = 1
[checkpoint]
enable = true
keep_latest_k = 1
"""
KINDS: Mapping[str, str] = {
    "settings": r"/job\.toml",
    "text, its tokens": r"/(data|cache)(/.*)?",
    "folder of the run": r"/run(/(?!checkpoint(/|$)).*)?",
    "look for checkpoints": r"/run/checkpoint(/step-\d+(/manifest\.json)?)?",
    "write": r"/run/checkpoint/\.step-\d+\.tmp.*",
    "read": r"/run/checkpoint/step-\d+/(?!manifest\.json).*",
    "remove": r"/run/checkpoint/\.step-\d+\.deleted.*",
}
"""Work, and the paths in the job's place that it asks for: the first pattern counts."""
STARTS = ("start, save", "resume, save, remove")
_CALL = re.compile(r"^(?:\d+ +)?\w+\((.*)")
Counts = dict[tuple[str, str], list[int]]
"""Of a start and a kind of work the calls of each rank."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--world", type=int, default=4096, metavar="N", help="ranks to work out")
    parser.add_argument("--files", type=int, default=4, metavar="N", help="files of text")


def measure(args: argparse.Namespace) -> Report:
    """Count for each number of ranks.

    Raises:
        UserError: strace is missing, or a job fails.
    """
    if shutil.which("strace") is None:
        raise ConfigError("strace must be installed, it is not found; apt-get install strace")
    counts = {ranks: count(ranks, num_files=args.files) for ranks in sorted(args.ranks)}
    return Report(
        about={"ranks": args.ranks, "files": args.files, "torch": torch.__version__},
        comparisons=[],
        tables={start: _table(counts, start, world=args.world) for start in STARTS},
        more={str(n): {f"{a}: {b}": c for (a, b), c in of.items()} for n, of in counts.items()},
    )


def count(ranks: int, *, num_files: int) -> Counts:
    """Start a job of `ranks` twice, and count what each rank asks for."""
    found: Counts = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        (folder / "job.toml").write_text(JOB)
        (folder / "data").mkdir()
        for number in range(num_files):
            (folder / "data" / f"{number}.txt").write_text(f"text {number}. " * 4000)
        _run(folder, 1, ["--training.steps=1", "--job.dump_folder=" + str(folder / "before")])
        for steps, start in enumerate(STARTS, start=1):
            _run(folder, ranks, [f"--training.steps={steps}", f"--job.dump_folder={folder}/run"])
            traces = [folder / f"{rank}.trace" for rank in range(ranks)]
            by_rank = [count_calls(trace, folder=str(folder)) for trace in traces]
            found |= {(start, kind): [each[kind] for each in by_rank] for kind in KINDS}
    return found


def count_calls(trace: Path, *, folder: str) -> Counter[str]:
    """Count by kind of work the calls of a trace that name a file in `folder`."""
    counts: Counter[str] = Counter()
    named = re.compile(re.escape(folder) + r'([^">]*)')
    for line in trace.read_text(encoding="utf-8", errors="replace").splitlines():
        call = _CALL.match(line)
        path = named.search(call[1]) if call else None
        # "" asks of a file that is open
        if path is None or '>, "", ' in line:
            continue
        kind = next((kind for kind, files in KINDS.items() if re.fullmatch(files, path[1])), None)
        if kind is not None:
            counts[kind] += 1
    return counts


def _run(folder: Path, ranks: int, arguments: Sequence[str]) -> None:
    """Run the job, each rank under strace."""
    processes = []
    with hold_port() as held:
        port = str(held.getsockname()[1])
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1}
    for rank in range(ranks):
        environ = {name: str(value) for name, value in {**shared, "RANK": rank}.items()}
        environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = ["strace", "-f", "-qq", "-y", "-s", "500", "-e", "trace=%file,getdents64"]
        command += ["-o", str(folder / f"{rank}.trace"), sys.executable, "-m", "torchtitan.train"]
        command += [f"--job.config_file={folder}/job.toml", *arguments]
        command += ["--training.global_batch_size", str(ranks)]
        command += [f"--training.dataset_path={folder}/data/*.txt"]
        command += [f"--training.dataset_cache={folder}/cache"]
        with (folder / f"{rank}.err").open("wb") as log:
            environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
            processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        said = (folder / "0.err").read_text(errors="replace")[-2000:]
        raise ConfigError(
            f"the job of {ranks} ranks must run, its ranks ended with {codes}: {said}"
        )


def _table(counts: Mapping[int, Counts], start: str, *, world: int) -> list[list[str]]:
    """Return the calls of rank 0 and of the rank with most of them beside it."""
    ranks = [*counts]
    rows = [["", *(f"{n} rank{'s' * (n > 1)}" for n in ranks), f"{world} ranks"]]
    for kind in KINDS:
        for who, pick in (("rank 0", lambda of: of[0]), ("another", lambda of: max(of[1:]))):
            calls = {
                n: pick(of[start, kind]) for n, of in counts.items() if n > 1 or who == "rank 0"
            }
            if any(calls.values()):
                shown = [str(calls[n]) if n in calls else "-" for n in ranks]
                rows.append([f"{kind}, {who}", *shown, f"{extend(calls, world):,}"])
    return rows


def extend(calls: Mapping[int, int], world: int) -> int:
    """Return the calls with `world` ranks, on the straight line through the two largest."""
    *_, (n, few), (m, many) = sorted(calls.items()) if len(calls) > 1 else [*calls.items()] * 2
    # whole, and none if there are fewer: who makes a folder first, and who hashes what, varies
    per_rank = max(round((many - few) / max(m - n, 1)), 0)
    return many + per_rank * (world - m)
