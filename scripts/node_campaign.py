"""Take a node from a running job and give it back, and prove that no sample was lost or read twice.

    python scripts/node_campaign.py --nodes 2 --fewest 1
    python scripts/node_campaign.py --case crash

Every node is a `python -m torchtitan.launch --nnodes 1:2` of its own on this machine, with its
ranks on gloo. One of them is killed with its ranks by SIGKILL while the run trains, and started
again after the others have gone on without it. At the end the samples that ranks have read, by
step, number and hash, must be those of a run on one process that nobody disturbed, and the losses
must agree to 1e-5. Exit code 0 if all of that holds, 1 if not.

Other cases (`--case`): a rank that crashes, or hangs.

The store where nodes meet is held by this script, so that any node may be killed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # works without being installed

from torch.distributed import TCPStore

from scripts.crash_campaign import RESUMED, STEP, TINY, CampaignError

TOLERANCE = 1e-5
RENDEZVOUS = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=3"
"""So short for one machine; torch's own are 5 s, 3 attempts and 30 s."""
MEETING = re.compile(r"(\d+) x .*, layout: ")
"""Of the log: the ranks that a start has."""


class Pace:
    """A callback: it holds steps up until the file `fast` is there, the later ones longer, so that
    no run is over before its node is back."""

    def __init__(self, folder: Path) -> None:
        self._fast = folder / "fast"

    def on_step(self, step: int, row: object) -> None:
        """Wait a little."""
        if not self._fast.exists():
            time.sleep(0.2 if step < 15 else 1.5)


@dataclass
class Job:
    """A job over several nodes of this machine."""

    folder: Path
    fewest: int
    most: int
    ranks: int
    steps: int
    seconds: float
    """The longest that any of it may take."""
    overrides: tuple[str, ...] = ()
    max_restarts: int = 9
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    """Nodes that were killed and are not back."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + self.seconds
        self.store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )
        (self.folder / "job.toml").write_text(TINY)

    @property
    def results(self) -> Path:
        """The folder of the run."""
        return self.folder / "run"

    def arguments(self, *, results: Path) -> list[str]:
        """Return the command of the trainer."""
        return [
            "-m",
            "torchtitan.train",
            f"--job.config_file={self.folder / 'job.toml'}",
            f"--job.dump_folder={results}",
            f"--training.dataset_cache={self.folder / 'cache'}",
            f"--training.steps={self.steps}",
            "--training.local_batch_size=1",
            f"--training.global_batch_size={12 * self.ranks}",  # for one to four nodes
            "--lr_scheduler.total_steps=1000000",
            "--checkpoint.interval=5",
            "--debug.log_sample_hashes",
            *self.overrides,
        ]

    def start_node(self, number: int) -> None:
        """Start a node, or start it again."""
        command = [sys.executable, "-m", "torchtitan.launch", f"--nnodes={self.fewest}:{self.most}"]
        command += [f"--max_restarts={self.max_restarts}"]
        command += [f"--nproc_per_node={self.ranks}", "--rdzv_backend=c10d", "--rdzv_id=campaign"]
        command += [f"--rdzv_endpoint=127.0.0.1:{self.store.port}", f"--rdzv_conf={RENDEZVOUS}"]
        command += ["--local_addr=127.0.0.1", *self.arguments(results=self.results)]
        command += ["--training.callbacks=scripts.node_campaign:Pace"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"node_{number}.txt").open("ab") as output:
            node = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        self.nodes[number : number + 1] = [node]
        self.lost.discard(number)

    def kill_node(self, number: int) -> None:
        """Kill a node with its ranks, as a loss of power does."""
        node = self.nodes[number]
        pids = [node.pid, *children(node.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        node.wait()
        self.lost.add(number)

    def signal_rank(self, node: int, number: signal.Signals) -> None:
        """Send a signal to the first rank of a node."""
        os.kill(children(self.nodes[node].pid)[0], number)

    def close(self) -> None:
        """Kill whatever still runs."""
        for number, node in enumerate(self.nodes):
            if node.poll() is None:
                self.kill_node(number)

    def log(self) -> str:
        """Return the log of all that were rank 0."""
        path = self.results / "logs" / "rank_0.log"
        return path.read_text() if path.is_file() else ""

    def wait_until(self, condition: Callable[[], bool], *, what: str) -> None:
        """Wait for something that the job must do.

        Raises:
            CampaignError: It has not done it in time, or has ended.
        """
        while not condition():
            ended = [node.poll() for node in self.nodes]
            if time.monotonic() > self.deadline or None not in ended:
                raise CampaignError(f"no {what}; codes of the nodes: {ended}\n{self.output()}")
            time.sleep(0.05)

    def wait_for_step(self, *, after: int, more: int = 1) -> None:
        """Wait for so many steps in the part of the log behind `after`, since it last resumed."""

        def has_come() -> bool:
            life = self.log()[after:]
            found = list(RESUMED.finditer(life))
            begins = found[-1].end() if found else None if after else 0
            return begins is not None and len(STEP.findall(life[begins:])) >= more

        self.wait_until(has_come, what=f"{more} steps after {after} characters of the log")

    def finish(self) -> None:
        """Let all nodes come to their end.

        Raises:
            CampaignError: One has another exit code than 0.
        """
        self.results.mkdir(exist_ok=True)
        (self.results / "fast").touch()
        try:
            codes = [node.wait(max(1, self.deadline - time.monotonic())) for node in self.nodes]
        except subprocess.TimeoutExpired as error:
            raise CampaignError(f"the nodes do not end\n{self.output()}") from error
        if any(code for number, code in enumerate(codes) if number not in self.lost):
            raise CampaignError(f"the nodes must end with 0, got {codes}\n{self.output()}")

    def starts(self) -> list[int]:
        """Return the number of ranks of each start so far."""
        return [int(number) for number in MEETING.findall(self.log())]

    def output(self) -> str:
        """Return what the nodes have said."""
        texts = sorted(self.folder.glob("node_*.txt"))
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in texts)

    def train_undisturbed(self) -> Path:
        """Train the same on one process; return its folder."""
        results = self.folder / "undisturbed"
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *self.arguments(results=results)]
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=self.seconds)
        return results


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()]


def samples(results: Path) -> list[tuple[int, int, str]]:
    """Return (number, step, hash) of every sample that any rank drew, in order."""
    rows = [
        json.loads(line)
        for path in (results / "samples").glob("rank_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted((row["index"], row["step"], row["hash"]) for row in rows)


def losses(results: Path) -> dict[int, float]:
    """Return the loss of each step."""
    rows: list[Any] = [
        json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()
    ]
    return {row["step"]: row["loss"] for row in rows}


def compare(disturbed: Path, undisturbed: Path) -> float:
    """Compare samples and losses of two runs; return the largest difference of a loss.

    Raises:
        CampaignError: A sample is missing, or there twice, or a loss differs.
    """
    if (ours := samples(disturbed)) != (theirs := samples(undisturbed)):
        both = set(ours) ^ set(theirs)
        raise CampaignError(f"{len(ours)} samples, not {len(theirs)}; others: {sorted(both)[:5]}")
    before, after = losses(undisturbed), losses(disturbed)
    if before.keys() != after.keys():
        raise CampaignError(f"other steps: {sorted(before.keys() ^ after.keys())[:9]}")
    worst = max(abs(before[step] - after[step]) for step in before)
    if worst > TOLERANCE:
        raise CampaignError(f"losses must agree to {TOLERANCE}, they differ by {worst}")
    return worst


def lose_and_return(job: Job, *, victim: int) -> tuple[float, float]:
    """Train on all nodes, kill one, go on, take it back; return the seconds from its death to the
    next step, and from its new start to the next step with it."""
    for number in range(job.most):
        job.start_node(number)
    full, fewer = job.most * job.ranks, (job.most - 1) * job.ranks
    job.wait_until(lambda: job.starts() == [full], what="start of all nodes")
    before = len(job.log())
    job.wait_until(lambda: len(STEP.findall(job.log()[before:])) >= 8, what="8 steps")
    before, at = len(job.log()), time.monotonic()
    job.kill_node(victim)
    job.wait_for_step(after=before)
    lost = time.monotonic() - at
    assert job.starts()[-1] == fewer
    job.wait_for_step(after=before, more=3)
    before, at = len(job.log()), time.monotonic()
    job.start_node(victim)
    job.wait_until(lambda: job.starts()[-1] == full, what="second start of all nodes")
    job.wait_for_step(after=before)
    returned = time.monotonic() - at
    job.wait_for_step(after=before, more=3)
    job.finish()
    return lost, returned


def restart(job: Job, how: signal.Signals) -> float:
    """Let one rank crash or hang; return the seconds from then to the next step."""
    job.overrides += ("--comm.train_timeout_seconds=10",)
    for number in range(job.most):
        job.start_node(number)
    job.wait_for_step(after=0, more=8)
    before, at = len(job.log()), time.monotonic()
    job.signal_rank(job.most - 1, how)
    job.wait_for_step(after=before)
    seconds = time.monotonic() - at
    job.finish()
    return seconds


CASES: dict[str, Callable[[Job], float]] = {
    "crash": lambda job: restart(job, signal.SIGKILL),
    "hang": lambda job: restart(job, signal.SIGSTOP),
}


def main() -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--case", choices=["return", *CASES], default="return")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--fewest", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each node")
    parser.add_argument("--victim", type=int, help="number of the node to kill; default: the last")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=300, help="longest time")
    options = parser.parse_args()
    victim = options.nodes - 1 if options.victim is None else options.victim
    with tempfile.TemporaryDirectory() as folder:
        given = {name: getattr(options, name) for name in ("fewest", "ranks", "steps", "seconds")}
        job = Job(folder=Path(folder), most=options.nodes, **given)
        try:
            if options.case == "return":
                lost, returned = lose_and_return(job, victim=victim)
                said = f"{lost:.1f} s after the death, {returned:.1f} s after the new start"
            else:
                said = f"{CASES[options.case](job):.1f} s after it"
            worst = compare(job.results, job.train_undisturbed())
        except CampaignError as error:
            print(error)
            return 1
        finally:
            job.close()
        num = len(samples(job.results))
        print(f"{num} samples in order; losses within {worst:.1e}; next step {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
