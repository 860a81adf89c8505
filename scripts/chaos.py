"""Disturb small trainings at random moments, and check that nothing is lost.

    python scripts/chaos.py kills --rounds 50     # checkpoints in a folder
    python scripts/chaos.py uploads --rounds 50   # in an S3 server on this machine (needs moto)
    python scripts/chaos.py nodes --rounds 3      # an elastic job loses a node and gets it back

kills, uploads: runs in random layouts, with synchronous or asynchronous saves, each killed five
times by SIGKILL, mostly during a save: one rank, or all. Uploads may also lose the disk, or hang
until the kill. After each kill every step that was reported as saved must exist undamaged, unless
retention has removed it, and the next start must resume from the newest. At the end the run is
finished, and each figure and tensor must equal those of an undisturbed run.

nodes: the samples that all ranks have read must be those of an undisturbed run on one process, and
the losses must agree to 1e-5.

Exit code 0 if all of this holds, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torch.distributed import TCPStore

from scripts import s3_server
from scripts.ports import hold_port
from scripts.s3_server import BUCKET, S3Server
from tests.distributed.jobs import read_rows, samples
from tests.jobs import TINY
from torchtitan import trainer
from torchtitan.base.errors import DataError
from torchtitan.checkpoint.checksums import MANIFEST, summarize, verify
from torchtitan.checkpoint.storage import find_steps
from torchtitan.tools.compare.launch import run_ranks
from torchtitan.tools.compare.words import parse_layout

ROOT = Path(__file__).parent.parent
LAYOUTS = ("single", "fsdp2", "tp2", "pp2", "cp2", "fsdp2,tp2")
MODES = ("disabled", "async")
KILLS_PER_RUN = 5
KEEP = 3
MAX_DELAY = 0.15
ENDLESS = 1_000_000
"""Number of steps of a run that is killed."""
SECONDS = 240
"""Longest time to wait for an event."""
LOSS_TOLERANCE = 1e-5
SAMPLE_LOG = "examples.sample_log:SampleLog"
SAVED = re.compile(r"(?:Saved|Wrote) (?!s3:)\S*step-(\d+)")
UPLOADED = re.compile(r"Saved s3:\S*step-(\d+)")
RESUMED, STEP = re.compile(r"Resumed from \S*step-(\d+)"), re.compile(r"step: +(\d+)")
MEETING = re.compile(r"(\d+) x .*, layout: ")
"""The number of ranks that a start logs."""
Processes = Sequence[subprocess.Popen[bytes]]


class LossError(Exception):
    """A run lost data, or failed."""


@dataclass(kw_only=True)
class Run:
    """A run of TINY that is started several times."""

    folder: Path
    options: Sequence[str] = ()
    world_size: int = 1
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def results(self) -> Path:
        """The run's dump folder."""
        return self.folder / "run"

    @property
    def output(self) -> str:
        """The last lines of each process."""
        files = sorted(self.folder.glob("output_*.txt"))
        return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in files)

    def arguments(self, *, steps: int, results: Path) -> list[str]:
        """Return the trainer's arguments."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "job.toml").write_text(TINY)
        return [
            f"--job.config_file={self.folder / 'job.toml'}",
            f"--job.dump_folder={results}",
            f"--training.dataset_cache={self.folder / 'cache'}",
            f"--training.steps={steps}",
            f"--lr_scheduler.total_steps={ENDLESS}",
            "--model.vocab_size=264",  # a multiple of two, for tensor parallelism
            *self.options,
        ]

    def spawn(
        self, words: Sequence[str], *, name: str, environ: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[bytes]:
        """Start `python -m words` with its output in `output_<name>.txt`."""
        environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
        with (self.folder / f"output_{name}.txt").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                env={**os.environ, **environ},
                stdout=output,
                stderr=output,
            )

    def wait_until(self, condition: Callable[[], bool], *, event: str) -> None:
        """Wait for an event.

        Raises:
            LossError: It takes too long, or all processes have ended.
        """
        deadline = time.monotonic() + SECONDS
        while not condition():
            codes = [process.poll() for process in self.processes]
            if time.monotonic() > deadline or None not in codes:
                raise LossError(f"no {event}; exit codes {codes}\n{self.output}")
            time.sleep(0.001)

    def wait_for_end(self) -> list[int | None]:
        """Return the exit codes of all processes.

        Raises:
            LossError: One of them does not end.
        """

        def has_ended() -> bool:
            return all(process.poll() is not None for process in self.processes)

        deadline = time.monotonic() + SECONDS
        while not has_ended():
            if time.monotonic() > deadline:
                raise LossError(f"the run does not end\n{self.output}")
            time.sleep(0.01)
        return [process.returncode for process in self.processes]

    def close(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            process.kill()
            process.wait()

    def train_undisturbed(self, *, steps: int) -> Path:
        """Train the same job without a disturbance and return its dump folder."""
        arguments = self.arguments(steps=steps, results=self.folder / "undisturbed")
        log = self.folder / "undisturbed.txt"
        if problem := run_ranks(arguments, world_size=self.world_size, log=log):
            raise DataError(f"the undisturbed run: the trainer {problem}")
        return self.folder / "undisturbed"


def steps_in(pattern: re.Pattern[str], log: str) -> list[int]:
    """Return the steps of all matches."""
    return [int(step) for step in pattern.findall(log)]


@dataclass(kw_only=True)
class KilledRun(Run):
    """A run whose starts are killed. With a server it saves to the store."""

    layout: str = "single"
    server: S3Server | None = None
    saved: set[int] = field(default_factory=set)
    """Steps that were reported as saved on the disk."""
    uploaded: set[int] = field(default_factory=set)
    """Steps that were reported as saved in the store."""
    rows: dict[int, str] = field(default_factory=dict)
    """Lines of metrics.jsonl on lost disks, by step."""

    def __post_init__(self) -> None:
        layout = parse_layout(self.layout)
        self.world_size, self.options = layout.world_size, (*layout.arguments, *self.options)

    @property
    def log(self) -> str:
        """The output of rank 0 since the last start."""
        path = self.folder / "output_0.txt"
        return path.read_text(errors="replace") if path.is_file() else ""

    @property
    def is_saving(self) -> bool:
        """Whether a save or an upload is in progress."""
        if self.server is None:
            return any((self.results / "checkpoint").glob(".step-*.tmp"))
        wrote, uploaded = steps_in(SAVED, self.log), steps_in(UPLOADED, self.log)
        return max(wrote, default=-1) > max(uploaded, default=-1)

    def start(self, *, steps: int = ENDLESS) -> None:
        """Start every rank without a launcher, so that one of them can be killed."""
        options: list[str] = []
        shared = {"MASTER_ADDR": "127.0.0.1"}
        if self.server is not None:
            options = [f"--checkpoint.folder=s3://{BUCKET}/run"]
            shared |= s3_server.environ_of(self.server.port)
        words = ["torchtitan.train", *self.arguments(steps=steps, results=self.results), *options]
        with hold_port() as port:
            shared |= {
                "MASTER_PORT": str(port.getsockname()[1]),
                "WORLD_SIZE": str(self.world_size),
            }
        self.processes = [
            self.spawn(
                words,
                name=str(rank),
                environ={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(self.world_size)
        ]

    def check(self) -> None:
        """Check the steps, and the one that the last start resumed from.

        Raises:
            LossError: A reported step is missing or damaged, or was not resumed from.
        """
        newest, resumed = max(self.saved | self.uploaded, default=0), steps_in(RESUMED, self.log)
        if newest and (not resumed or resumed[0] < newest):
            raise LossError(f"step {newest} was saved, the next start resumed from {resumed}")
        self.saved |= set(steps_in(SAVED, self.log))
        self.uploaded |= set(steps_in(UPLOADED, self.log))
        with self.stored() as folder:
            steps = find_steps(folder)
            for step in steps:
                if mistakes := verify(folder / f"step-{step}", group=None):
                    raise LossError(f"step {step} is damaged: {summarize(mistakes)}")
        for step in self.uploaded if self.server else self.saved:
            if step not in steps and sum(other > step for other in steps) < KEEP:
                raise LossError(f"step {step} was reported as saved; the steps are {steps}")

    @contextmanager
    def stored(self) -> Iterator[Path]:
        """Give the folder of all steps. Those of a store are downloaded."""
        if self.server is None:
            yield self.results / "checkpoint"
            return
        with tempfile.TemporaryDirectory() as folder:
            client = self.server.client()
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
            names = [each["Key"] for page in pages for each in page.get("Contents", ())]
            steps = [name.split("/")[1] for name in names if name.endswith(f"/{MANIFEST}")]
            for name in names:
                _, step, *inner = name.split("/")
                if step in steps:  # the manifest, or a file below the manifest's checksum
                    file = Path(folder).joinpath(step, *(inner[1:] or inner))
                    file.parent.mkdir(parents=True, exist_ok=True)
                    client.download_file(BUCKET, name, str(file))
            yield Path(folder)

    def lose_disk(self) -> None:
        """Delete the run's folder, except the logged figures."""
        self.rows |= self.logged()
        shutil.rmtree(self.results)
        self.saved.clear()

    def logged(self) -> dict[int, str]:
        """Return the complete lines of metrics.jsonl by step."""
        file = self.results / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        return {json.loads(line)["step"]: line for line in lines if line.endswith("\n")}

    def kill(self, *, rng: random.Random) -> str:
        """Start the run, kill it, check, and return a description."""
        num_saves, is_in_save = rng.randint(1, 3), rng.random() < 0.7
        pattern = SAVED if self.server is None else UPLOADED

        def is_time() -> bool:
            return len(pattern.findall(self.log)) >= num_saves and (
                self.is_saving or not is_in_save
            )

        self.start()
        try:
            self.wait_until(is_time, event=f"save number {num_saves}")
            hanging = self.server if rng.random() < 0.5 else None
            if hanging is not None:
                hanging.pause()
            time.sleep(rng.uniform(0, MAX_DELAY / 5 if is_in_save else MAX_DELAY))
            victims = self.processes if rng.random() < 0.5 else [rng.choice(self.processes)]
            for process in victims:
                process.kill()
            fault = "all ranks" if len(victims) == len(self.processes) else "one rank"
            fault += " in a save" if self.is_saving else ""
            if hanging is not None:
                hanging.go_on()
            self.wait_for_end()  # the other ranks notice by themselves
        finally:
            self.close()
        if self.server is not None and self.uploaded and rng.random() < 0.3:
            fault += " and the disk"
            self.check()
            self.lose_disk()
        else:
            self.check()
        return fault

    def finish(self, *, steps: int) -> None:
        """Train to `steps` without a fault."""
        self.start(steps=steps)
        try:
            if any(codes := self.wait_for_end()):
                raise LossError(f"the run ended with exit codes {codes}\n{self.output}")
        finally:
            self.close()
        self.check()


def kill_again_and_again(run: KilledRun, *, kills: int, rng: random.Random) -> str:
    """Kill a run `kills` times, finish it, and compare; return a summary."""
    run.options = (
        *run.options,
        "--checkpoint.interval=2",
        f"--checkpoint.keep_latest_k={KEEP}",
        "--comm.init_timeout_seconds=60",
    )
    faults = [run.kill(rng=rng) for _ in range(kills)]
    steps = max(run.saved | run.uploaded) + 5  # a save of its own, beyond all steps so far
    run.finish(steps=steps)
    rows = run.rows | run.logged()
    (run.results / "metrics.jsonl").write_text("".join(rows[step] for step in sorted(rows)))
    undisturbed = run.train_undisturbed(steps=steps)
    words = ["torchtitan", "compare", "runs", str(undisturbed), str(run.results)]
    if run.spawn(words, name="compare").wait():
        raise LossError(f"the runs differ\n{run.output}")
    return f"{run.layout}: killed {', '.join(faults)}; {steps} steps equal"


class Pace:
    """A callback that delays steps until the file `fast` exists in the run's folder.

    Later steps are delayed longer, so that no run ends before a lost node returns.
    """

    def on_start(self, run: trainer.Run) -> None:
        """Find the run's folder."""
        self._fast = run.folder / "fast"

    def on_step(self, step: int, row: object) -> None:
        """Sleep."""
        if not self._fast.exists():
            time.sleep(0.2 if step < 15 else 1.5)


@dataclass(kw_only=True)
class ElasticRun(Run):
    """A run over several nodes of this machine, with one rank each.

    This process holds the store where nodes meet, so that any node may be killed.
    """

    nodes: int
    steps: int
    options: Sequence[str] = (
        "--training.local_batch_size=1",
        "--training.global_batch_size=12",  # for one to four nodes
        "--checkpoint.interval=5",
        f"--training.callbacks={SAMPLE_LOG}",
    )

    def __post_init__(self) -> None:
        self.store = TCPStore(
            *("127.0.0.1", 0),
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )

    @property
    def log(self) -> str:
        """The log of rank 0 over all starts."""
        path = self.results / "logs" / "rank_0.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def start_node(self, number: int) -> None:
        """Start a node, or start it again."""
        # shorter than torch's defaults (5 s, 3 attempts, 30 s), which are for many machines
        times = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=3"
        words = ["torchtitan.launch", f"--nnodes=1:{self.nodes}", "--nproc_per_node=1"]
        words += ["--max_restarts=9", "--rdzv_backend=c10d", "--rdzv_id=chaos"]
        words += [f"--rdzv_endpoint=127.0.0.1:{self.store.port}", f"--rdzv_conf={times}"]
        words += ["--local_addr=127.0.0.1", "-m", "torchtitan.train"]
        words += self.arguments(steps=self.steps, results=self.results)
        words += [
            f'--training.callbacks=[{{path = "{SAMPLE_LOG}"}}, {{path = "scripts.chaos:Pace"}}]'
        ]
        self.processes[number : number + 1] = [self.spawn(words, name=f"node_{number}")]

    def kill_node(self, number: int) -> None:
        """Kill a node and its rank, as a power failure does."""
        pid = self.processes[number].pid
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, ranks)):
            os.kill(each, signal.SIGKILL)
        self.processes[number].wait()

    def close(self) -> None:
        """Kill all nodes that still run."""
        for number, process in enumerate(self.processes):
            if process.poll() is None:
                self.kill_node(number)

    def starts(self) -> list[int]:
        """Return the number of ranks of each start so far."""
        return [int(number) for number in MEETING.findall(self.log)]

    def wait_for_steps(self, count: int, *, num_starts: int) -> None:
        """Wait until the latest start, of so many, has made `count` steps."""

        def has_steps() -> bool:
            *_, last = MEETING.split(self.log)
            return len(self.starts()) == num_starts and len(STEP.findall(last)) >= count

        self.wait_until(has_steps, event=f"{count} steps of start {num_starts}")


def lose_node(run: ElasticRun, *, victim: int) -> str:
    """Kill a node during training, start it again, and compare; return a summary."""
    try:
        for number in range(run.nodes):
            run.start_node(number)
        run.wait_for_steps(8, num_starts=1)
        run.kill_node(victim)
        run.wait_for_steps(3, num_starts=2)
        run.start_node(victim)
        run.wait_for_steps(3, num_starts=3)
        (run.results / "fast").touch()
        if any(codes := run.wait_for_end()):
            raise LossError(f"the nodes ended with exit codes {codes}\n{run.output}")
    finally:
        run.close()
    undisturbed = run.train_undisturbed(steps=run.steps)
    ours, expected = samples(run.results), samples(undisturbed)
    if ours != expected:
        raise LossError(f"samples differ: {sorted({*ours} ^ {*expected})[:5]}")
    before, after = losses(undisturbed), losses(run.results)
    if before.keys() != after.keys():
        raise LossError(f"steps differ: {sorted(before.keys() ^ after.keys())[:9]}")
    worst = max(abs(before[step] - after[step]) for step in before)
    if worst > LOSS_TOLERANCE:
        raise LossError(f"losses differ by {worst}, more than {LOSS_TOLERANCE}")
    return f"node {victim} lost: ranks {run.starts()}, {len(ours)} samples, losses to {worst:.1e}"


def losses(results: Path) -> dict[int, float]:
    """Return the loss of each step."""
    return {row["step"]: row["loss"] for row in read_rows(results)}


def run_rounds(kind: str, *, rounds: int, rng: random.Random, folder: Path) -> None:
    """Run `rounds` faults, and print a line for each run."""
    if kind == "nodes":
        for number in range(rounds):
            elastic = ElasticRun(folder=folder / str(number), nodes=2, steps=45)
            print(lose_node(elastic, victim=rng.randrange(2)), flush=True)
        return
    with ExitStack() as cleanup:
        server = cleanup.enter_context(s3_server.s3_server()) if kind == "uploads" else None
        for number, done in enumerate(range(0, rounds, KILLS_PER_RUN)):
            if server is not None:
                server.empty_bucket()
            run = KilledRun(
                folder=folder / str(number),
                layout=rng.choice(LAYOUTS),
                options=(f"--checkpoint.async_mode={rng.choice(MODES)}",),
                server=server,
            )
            kills = min(KILLS_PER_RUN, rounds - done)
            print(kill_again_and_again(run, kills=kills, rng=rng), flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the faults and return the exit code."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["kills", "uploads", "nodes"])
    parser.add_argument("--rounds", type=int, default=50, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    parser.add_argument("--folder", type=Path, help="keep all files here (default: delete them)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder, rng = options.folder or Path(temporary), random.Random(options.seed)
        try:
            run_rounds(options.kind, rounds=options.rounds, rng=rng, folder=folder)
        except LossError as error:
            sys.stderr.write(f"failed: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
