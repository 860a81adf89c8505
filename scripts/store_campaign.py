"""Kill a run and its object store again and again, around uploads, and prove that nothing is lost.

    python scripts/store_campaign.py --rounds 100
    python scripts/store_campaign.py --rounds 100 --server 's3rver -d {folder} -p {port} -s' \\
        --key S3RVER --secret S3RVER

A small job of two ranks saves every other step to s3://, over a wire that is narrow, sometimes
busy, and cuts some answers short. Each round is a fault at a random moment, mostly within an
upload: one rank is killed, or all are, or all and their disk is lost; the wire is cut for a while,
or the server itself is killed and started again, if it is one that keeps its objects (--server;
moto's, without one, does not). After every round the store is read by a client of its own, boto3:
each step with a manifest must be whole to the last byte, none that the log reported as uploaded may
be gone unless retention has replaced it, and the next life must go on from the newest that its disk
and the store have. At the end the run is finished and compared, bit for bit, with one that saved to
a folder and was never disturbed. Exit code 0 if all of that holds, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # works without being installed

from scripts import s3_server
from scripts.crash_campaign import (
    RESUMED,
    SAVED,
    STEP,
    TINY,
    CampaignError,
    compare_runs,
    start_ranks,
)
from scripts.ports import hold_port
from scripts.s3_server import BUCKET, Store
from torchtitan.checkpoint.checksums import MANIFEST, summarize, verify

KEEP, RANKS = 3, 2
FAULTS = ("one rank", "all ranks", "all ranks and the disk", "the wire", "the server")
UPLOADED = re.compile(r"Uploaded \S*step-(\d+)")
SECONDS, SECONDS_TO_END = 120, 90
MOST_SECONDS_AWAY = 2.0
BYTES_PER_SECOND = 1.5e6


@dataclass
class Run:
    """One run of many lives."""

    folder: Path
    store: Store
    uploaded: set[int] = field(default_factory=set)
    """Steps that the log has reported as uploaded."""
    saved: set[int] = field(default_factory=set)
    """And as saved, on a disk that is not lost."""
    rows: dict[int, str] = field(default_factory=dict)
    """What disks that are lost had of metrics.jsonl, by step."""
    place: socket.socket | None = None
    """Holds the port at which the ranks of this life meet."""

    def start(self, *, steps: int, wire: bool = True) -> list[subprocess.Popen[bytes]]:
        """Start every rank; their output goes to a file each."""
        self.folder.mkdir(parents=True, exist_ok=True)
        job = self.folder / "job.toml"
        job.write_text(TINY)
        words = [f"job.config_file={job}", f"job.dump_folder={self.folder / 'run'}"]
        words += [f"training.steps={steps}", "lr_scheduler.total_steps=1000000"]
        words += [f"training.dataset_cache={self.folder.parent / 'cache'}"]
        words += ["comm.init_timeout_seconds=60", "checkpoint.async_mode=async"]
        words += ["checkpoint.interval=2", f"checkpoint.keep_latest_k={KEEP}"]
        words += [f"checkpoint.folder=s3://{BUCKET}/run", "checkpoint.upload_timeout_seconds=60"]
        command = [sys.executable, "-m", "torchtitan.train", *(f"--{word}" for word in words)]
        to = self.store.wire.port if wire else self.store.server.port
        environ = s3_server.environ_of(to, key=self.store.key, secret=self.store.secret)
        if self.place is not None:
            self.place.close()
        self.place = hold_port()
        return start_ranks(command, world=RANKS, place=self.place, folder=self.folder, more=environ)

    @property
    def log(self) -> str:
        """What the ranks of this life have written."""
        return (self.folder / "output_0.txt").read_text(errors="replace")

    @property
    def output(self) -> str:
        """The end of what each rank of this life wrote."""
        return "\n".join(p.read_text()[-3000:] for p in sorted(self.folder.glob("output_*.txt")))

    @property
    def is_uploading(self) -> bool:
        """Whether a step was saved here that is not reported as uploaded."""
        log = self.log
        return max(_steps(SAVED, log), default=-1) > max(_steps(UPLOADED, log), default=-1)

    def await_uploads(self, count: int, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        """Wait until this life has reported so many.

        Raises:
            CampaignError: It ends before, or takes too long.
        """
        self._await(lambda: len(_steps(UPLOADED, self.log)) >= count, ranks, f"upload {count}")

    def await_upload_begun(self, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        """Wait until an upload is under way."""
        self._await(lambda: self.is_uploading, ranks, "the next upload")

    def _await(
        self, is_there: Callable[[], bool], ranks: Sequence[subprocess.Popen[bytes]], what: str
    ) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_there():
            if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
                raise CampaignError(f"a life came to no {what}:\n{self.output}")
            time.sleep(0.002)

    @property
    def metrics(self) -> Path:
        """The file of logged figures."""
        return self.folder / "run" / "metrics.jsonl"

    def lose_disk(self) -> None:
        """Delete all that the run has on this machine; its figures are kept aside, to compare."""
        self.rows |= _rows(self.metrics)
        shutil.rmtree(self.folder / "run")
        self.saved.clear()

    def note(self) -> None:
        """Remember what this life reported, and check where it had started.

        Raises:
            CampaignError: It went on from an older step than its disk or the store had.
        """
        log = self.log
        newest = max(self.saved | self.uploaded, default=0)
        if STEP.search(log) and newest:
            resumed = _steps(RESUMED, log)
            if not resumed or resumed[0] < newest:
                raise CampaignError(f"step {newest} was there, the life went on from {resumed}")
        self.saved |= set(_steps(SAVED, log))
        self.uploaded |= set(_steps(UPLOADED, log))

    def check(self) -> int:
        """Check the store by a client of its own; return the number of committed steps.

        Raises:
            CampaignError: A step that was reported is gone, or one that is there is damaged.
        """
        with tempfile.TemporaryDirectory() as folder:
            here = fetch(self.store, Path(folder))
            for step in here:
                if mistakes := verify(Path(folder) / f"run/step-{step}", group=None):
                    raise CampaignError(f"step {step} of the store: {summarize(mistakes)}")
                manifest = Path(folder) / f"run/step-{step}/{MANIFEST}"
                if json.loads(manifest.read_text())["step"] != step:
                    raise CampaignError(f"step {step} of the store is another")
        for step in self.uploaded:
            if step not in here and sum(other > step for other in here) < KEEP:
                raise CampaignError(f"step {step} was reported as uploaded; found {here} alone")
        return len(here)


def fetch(store: Store, into: Path) -> list[int]:
    """Copy every step with a manifest, and return them; what has none is no checkpoint."""
    pages = store.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    names = [each["Key"] for page in pages for each in page.get("Contents", ())]
    steps = [name.split("/")[1] for name in names if name.endswith(f"/{MANIFEST}")]
    for name in names:
        if name.split("/")[1] in steps:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            store.client.download_file(BUCKET, name, str(into / name))
    return sorted(int(step.removeprefix("step-")) for step in steps)


def _steps(pattern: re.Pattern[str], log: str) -> list[int]:
    return [int(step) for step in pattern.findall(log)]


def _rows(file: Path) -> dict[int, str]:
    """Return the whole lines of a metrics.jsonl, by step."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return {json.loads(line)["step"]: line for line in lines if line.endswith("\n")}


def suffer(run: Run, fault: str, *, rng: random.Random) -> bool:
    """Let one life go through a fault; return whether an upload was under way at the moment."""
    wire, server = run.store.wire, run.store.server
    wire.bytes_per_second = BYTES_PER_SECOND * rng.uniform(0.3, 1)
    wire.busy_share, wire.cut_share = rng.choice([0, 0.03]), rng.choice([0, 0.03])
    ranks = run.start(steps=1_000_000)
    try:
        uploads = rng.randint(1, 2)
        run.await_uploads(uploads, ranks)
        if rng.random() < 0.8:
            run.await_upload_begun(ranks)
            time.sleep(rng.uniform(0, 0.3))
        else:
            time.sleep(rng.uniform(0, 0.5))
        within = run.is_uploading
        if fault in ("the wire", "the server"):
            wire.cut()
            if fault == "the server":
                server.kill()
            time.sleep(rng.uniform(0, MOST_SECONDS_AWAY))
            if fault == "the server":
                server.start()
            wire.mend()
            run.await_uploads(uploads + 2, ranks)  # the run has gone on
        victims = [rng.choice(ranks)] if fault == "one rank" else ranks
        for rank in victims:
            rank.kill()
        deadline = time.monotonic() + SECONDS_TO_END
        for rank in ranks:
            rank.wait(timeout=max(0.1, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    run.note()
    if fault == "all ranks and the disk":
        run.lose_disk()
    run.check()
    return within


def finish(run: Run, *, steps: int) -> None:
    """Train to `steps` undisturbed."""
    ranks = run.start(steps=steps, wire=False)
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise CampaignError(f"the run ended with {codes}:\n{run.output}")
    run.note()
    run.check()


def campaign(folder: Path, store: Store, *, rounds: int, rng: random.Random) -> str:
    """Go through `rounds` faults, finish the run, and compare; return what came of it."""
    run = Run(folder / "disturbed", store)
    faults = [fault for fault in FAULTS if fault != "the server" or store.command is not None]
    met: Counter[str] = Counter()
    num_within = 0
    for number in range(1, rounds + 1):
        fault = faults[(number - 1) % len(faults)]
        within = suffer(run, fault, rng=rng)
        met[fault] += 1
        num_within += within
        print(
            f"{number}/{rounds}: {fault}{' within an upload' if within else ''}; whole up to step "
            f"{max(run.uploaded)}",
            flush=True,
        )
    steps = max(run.uploaded | run.saved) + 5  # further than any life has come
    finish(run, steps=steps)
    rows = run.rows | _rows(run.metrics)
    run.metrics.write_text("".join(rows[step] for step in sorted(rows)))
    whole = folder / "whole"
    train_whole(whole, steps=steps, cache=folder / "cache")
    compare_runs(whole / "run", run.folder / "run")
    counts = ", ".join(f"{count} x {fault}" for fault, count in met.items())
    return f"{rounds} faults ({counts}), {num_within} within an upload; {steps} steps, equal"


def train_whole(folder: Path, *, steps: int, cache: Path) -> None:
    """Train the same job undisturbed, with checkpoints in a folder."""
    folder.mkdir()
    (folder / "job.toml").write_text(TINY)
    command = [sys.executable, "-m", "torchtitan.launch", "--standalone"]
    command += [f"--nproc_per_node={RANKS}", "-m", "torchtitan.train"]
    command += [f"--job.config_file={folder / 'job.toml'}", f"--job.dump_folder={folder / 'run'}"]
    command += [f"--training.steps={steps}", "--lr_scheduler.total_steps=1000000"]
    command += [f"--training.dataset_cache={cache}", "--checkpoint.interval=1000000"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environ, timeout=600, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CampaignError(f"the undisturbed run ended with {done.returncode}:\n{done.stderr}")


def main(argv: Sequence[str]) -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="faults to go through")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--server", help="command of a server that keeps what it stores")
    parser.add_argument("--key", default="AKIAIOSFODNN7EXAMPLE", help="its access key")
    parser.add_argument("--secret", default=s3_server.SECRET, help="and what belongs to it")
    options = parser.parse_args(argv)
    started = time.monotonic()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        store = Store(folder / "store", options.server, options.key, options.secret)
        store.start(seed=options.seed)
        undo.callback(store.close)
        try:
            rng = random.Random(options.seed)
            print(campaign(folder, store, rounds=options.rounds, rng=rng))
        except CampaignError as error:
            sys.stderr.write(f"failed: {error}\n")
            return 1
    print(f"nothing lost in {options.rounds} faults, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
