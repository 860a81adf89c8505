"""Kill a run and its object store around uploads, and check that no checkpoint is lost.

    python scripts/store_campaign.py --rounds 100
    python scripts/store_campaign.py --rounds 100 --server 's3rver -d {folder} -p {port} -s' \\
        --key S3RVER --secret S3RVER

A small job of two ranks saves every other step to s3:// through a slow relay that sometimes answers
"slow down" and cuts some responses short. Each round is a fault at a random moment, mostly during
an upload: one rank is killed, or all ranks, or all ranks and their disk; the relay drops all
connections for a while, or the server is killed and started again (only with --server: moto's
server, the default, loses its objects). After each round boto3 reads the store: each step with a
manifest must be undamaged, no step that was logged as uploaded may be missing unless retention has
removed it, and the next start must resume from the newest step on disk or in the store. At the end
the run is finished and compared, bit for bit, with an undisturbed run that saved to a folder. Exit
code 0 if all of this holds, else 1.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from scripts import s3_server
from scripts.campaign import (
    ENDLESS,
    RESUMED,
    STEP,
    CampaignError,
    Run,
    build_parser,
    compare_runs,
    kill,
    run_campaign,
    steps_in,
)
from scripts.s3_server import BUCKET, Store
from torchtitan.checkpoint.checksums import MANIFEST, summarize, verify

KEEP, RANKS = 3, 2
FAULTS = ("one rank", "all ranks", "all ranks and the disk", "the relay", "the server")
WROTE = re.compile(r"Wrote \S*step-(\d+)")
UPLOADED = re.compile(r"Saved s3:\S*step-(\d+)")
MOST_SECONDS_AWAY = 2.0
BYTES_PER_SECOND = 1.5e6
OPTIONS = (
    "--comm.init_timeout_seconds=60",
    "--checkpoint.async_mode=async",
    "--checkpoint.interval=2",
    f"--checkpoint.keep_latest_k={KEEP}",
    f"--checkpoint.folder=s3://{BUCKET}/run",
    "--checkpoint.upload_timeout_seconds=60",
)


@dataclass(kw_only=True)
class StoredRun(Run):
    """A run that saves to the store."""

    store: Store
    ranks: int = RANKS
    options: tuple[str, ...] = OPTIONS
    seconds: float = 120
    uploaded: set[int] = field(default_factory=set)
    """Steps that were logged as uploaded."""
    saved: set[int] = field(default_factory=set)
    """Steps that were logged as saved on a disk that still exists."""
    rows: dict[int, str] = field(default_factory=dict)
    """Lines of metrics.jsonl on lost disks, by step."""

    def start_through(self, port: int, *, steps: int = ENDLESS) -> list[subprocess.Popen[bytes]]:
        """Start every rank with the port of the relay or of the server."""
        store = self.store
        environ = s3_server.environ_of(port, key=store.key, secret=store.secret)
        return self.start(steps=steps, environ=environ)

    @property
    def log(self) -> str:
        """The output of rank 0 since the last start; the log may be on a lost disk."""
        return (self.folder / "output_0.txt").read_text(errors="replace")

    @property
    def is_uploading(self) -> bool:
        """Whether a saved step is not yet logged as uploaded."""
        log = self.log
        return max(steps_in(WROTE, log), default=-1) > max(steps_in(UPLOADED, log), default=-1)

    @property
    def metrics(self) -> Path:
        """The file of logged figures."""
        return self.results / "metrics.jsonl"

    def lose_disk(self) -> None:
        """Delete the run's folder, except the logged figures."""
        self.rows |= _rows(self.metrics)
        shutil.rmtree(self.results)
        self.saved.clear()

    def note(self) -> None:
        """Record the steps of the last start, and check the step that it resumed from.

        Raises:
            CampaignError: A newer step was on its disk or in the store.
        """
        log, newest = self.log, max(self.saved | self.uploaded, default=0)
        resumed = steps_in(RESUMED, log)
        if STEP.search(log) and newest and (not resumed or resumed[0] < newest):
            raise CampaignError(f"step {newest} existed, the start resumed from {resumed}")
        self.saved |= set(steps_in(WROTE, log))
        self.uploaded |= set(steps_in(UPLOADED, log))

    def check(self) -> int:
        """Check the store with boto3; return the number of committed steps.

        Raises:
            CampaignError: An uploaded step is missing or damaged.
        """
        with tempfile.TemporaryDirectory() as folder:
            steps = fetch(self.store, Path(folder))
            for step in steps:
                path = Path(folder) / f"run/step-{step}"
                if mistakes := verify(path, group=None):
                    raise CampaignError(f"step {step} in the store: {summarize(mistakes)}")
                if json.loads((path / MANIFEST).read_text())["step"] != step:
                    raise CampaignError(f"step {step} in the store has another step's manifest")
        for step in self.uploaded:
            if step not in steps and sum(other > step for other in steps) < KEEP:
                raise CampaignError(f"step {step} was logged as uploaded; found {steps}")
        return len(steps)


def fetch(store: Store, into: Path) -> list[int]:
    """Download every step that has a manifest, and return the steps."""
    pages = store.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    names = [each["Key"] for page in pages for each in page.get("Contents", ())]
    steps = [name.split("/")[1] for name in names if name.endswith(f"/{MANIFEST}")]
    for name in names:
        run, step, *inner = name.split("/")
        if step in steps:
            # the manifest, or a file of an attempt, which has the name of the file in the step
            file = into.joinpath(run, step, *(inner[1:] or inner))
            file.parent.mkdir(parents=True, exist_ok=True)
            store.client.download_file(BUCKET, name, str(file))
    return sorted(int(step.removeprefix("step-")) for step in steps)


def _rows(file: Path) -> dict[int, str]:
    """Return the complete lines of a metrics.jsonl, by step."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return {json.loads(line)["step"]: line for line in lines if line.endswith("\n")}


def break_connection(run: StoredRun, fault: str, *, rng: random.Random) -> None:
    """Drop all connections for a while; kill and restart the server if it is the fault."""
    relay, server = run.store.relay, run.store.server
    relay.disconnect()
    if fault == "the server":
        server.kill()
    time.sleep(rng.uniform(0, MOST_SECONDS_AWAY))
    if fault == "the server":
        server.start()
    relay.reconnect()


def suffer(run: StoredRun, fault: str, *, rng: random.Random) -> bool:
    """Start the run and let it meet a fault; return whether an upload was in progress."""
    relay = run.store.relay
    relay.bytes_per_second = BYTES_PER_SECOND * rng.uniform(0.3, 1)
    relay.busy_share, relay.cut_share = rng.choice([0, 0.03]), rng.choice([0, 0.03])
    ranks = run.start_through(relay.port)

    def wait_until(condition: Callable[[], bool], what: str) -> None:
        run.wait_until(condition, what=what, processes=ranks)

    def has_uploads(count: int) -> bool:
        return len(steps_in(UPLOADED, run.log)) >= count

    try:
        uploads = rng.randint(1, 2)
        wait_until(lambda: has_uploads(uploads), f"upload {uploads}")
        if rng.random() < 0.8:
            wait_until(lambda: run.is_uploading, "next upload")
            time.sleep(rng.uniform(0, 0.3))
        else:
            time.sleep(rng.uniform(0, 0.5))
        is_uploading = run.is_uploading
        if fault in ("the relay", "the server"):
            break_connection(run, fault, rng=rng)
            wait_until(lambda: has_uploads(uploads + 2), "upload after the fault")
        for rank in [rng.choice(ranks)] if fault == "one rank" else ranks:
            rank.kill()
        run.wait_for_end(ranks)
    finally:
        kill(ranks)
    run.note()
    if fault == "all ranks and the disk":
        run.lose_disk()
    run.check()
    return is_uploading


def finish(run: StoredRun, *, steps: int) -> None:
    """Train to `steps` without a fault."""
    run.finish(run.start_through(run.store.server.port, steps=steps))
    run.note()
    run.check()


def disturb(folder: Path, store: Store, *, rounds: int, rng: random.Random) -> str:
    """Let a run meet `rounds` faults, finish it, and compare; return a summary."""
    run = StoredRun(folder=folder / "disturbed", store=store)
    faults = [fault for fault in FAULTS if fault != "the server" or store.command is not None]
    met: Counter[str] = Counter()
    num_in_upload = 0
    for number in range(1, rounds + 1):
        fault = faults[(number - 1) % len(faults)]
        is_uploading = suffer(run, fault, rng=rng)
        met[fault] += 1
        num_in_upload += is_uploading
        during = " during an upload" if is_uploading else ""
        print(f"{number}/{rounds}: {fault}{during}; newest step {max(run.uploaded)}", flush=True)
    steps = max(run.uploaded | run.saved) + 5  # beyond all steps so far
    finish(run, steps=steps)
    rows = run.rows | _rows(run.metrics)
    run.metrics.write_text("".join(rows[step] for step in sorted(rows)))
    undisturbed = Run(folder=folder / "undisturbed").train_undisturbed(steps=steps, ranks=RANKS)
    compare_runs(undisturbed, run.results)
    counts = ", ".join(f"{count} x {fault}" for fault, count in met.items())
    return f"{rounds} faults ({counts}), {num_in_upload} during an upload; {steps} steps equal"


def campaign(options: Namespace, folder: Path) -> str:
    """Start the store, and disturb a run."""
    store = Store(folder / "store", options.server, options.key, options.secret)
    store.start(seed=options.seed)
    try:
        rng = random.Random(options.seed)
        return disturb(folder, store, rounds=options.rounds, rng=rng)
    finally:
        store.close()


def main(argv: Sequence[str]) -> int:
    """Run the campaign and return the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--server", help="command of a server that keeps its objects")
    parser.add_argument("--key", default=s3_server.KEY, help="access key of the server")
    parser.add_argument("--secret", default=s3_server.SECRET, help="secret of the access key")
    return run_campaign(campaign, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
