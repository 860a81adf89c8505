"""Remove a node from an elastic job and return it, and check that every sample is read once.

    python scripts/node_campaign.py --nodes 2 --fewest 1
    python scripts/node_campaign.py --case crash

Each node is a `python -m torchtitan.launch --nnodes 1:2` on this machine, with gloo. One node and
its ranks are killed by SIGKILL during training, and the node is started again after the other nodes
have resumed. The samples that all ranks have read, by step, number and hash, must equal those of an
undisturbed run on one process, and the losses must agree to 1e-5. Exit code 0 if all of this holds,
else 1. With `--case crash` or `--case hang` a rank crashes or hangs instead.

This script holds the store where nodes meet, so that any node may be killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torch.distributed import TCPStore

from scripts.campaign import CampaignError, Run, build_parser, run_campaign

TOLERANCE = 1e-5
RENDEZVOUS = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=3"
"""Shorter than torch's defaults (5 s, 3 attempts, 30 s), which are for many machines."""
MEETING = re.compile(r"(\d+) x .*, layout: ")
"""The number of ranks that a start logs."""


@dataclass(kw_only=True)
class ElasticRun(Run):
    """A run over several nodes of this machine; `ranks` is the number per node."""

    fewest: int
    nodes: int
    steps: int
    max_restarts: int = 9
    poll_seconds: float = 0.05
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    """Nodes that were killed and have not returned."""

    def __post_init__(self) -> None:
        self.options += (
            "--training.local_batch_size=1",
            f"--training.global_batch_size={12 * self.ranks}",  # for one to four nodes
            "--checkpoint.interval=5",
            "--training.callbacks=examples.sample_log:SampleLog",
        )
        self.store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )

    def start_node(self, number: int) -> None:
        """Start a node, or start it again."""
        command = [sys.executable, "-m", "torchtitan.launch"]
        command += [f"--nnodes={self.fewest}:{self.nodes}", f"--nproc_per_node={self.ranks}"]
        command += [f"--max_restarts={self.max_restarts}", "--rdzv_backend=c10d"]
        command += ["--rdzv_id=campaign", f"--rdzv_endpoint=127.0.0.1:{self.store.port}"]
        command += [f"--rdzv_conf={RENDEZVOUS}", "--local_addr=127.0.0.1", "-m", "torchtitan.train"]
        command += [*self.arguments(steps=self.steps), "--training.callbacks=scripts.campaign:Pace"]
        launcher = self.spawn(command, name=f"node_{number}", environ={})
        self.launchers[number : number + 1] = [launcher]
        self.lost.discard(number)

    def kill_node(self, number: int) -> None:
        """Kill a node and its ranks, as a power failure does."""
        launcher = self.launchers[number]
        for pid in (launcher.pid, *children(launcher.pid)):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        self.lost.add(number)

    def close(self) -> None:
        """Kill all nodes that still run."""
        for number, launcher in enumerate(self.launchers):
            if launcher.poll() is None:
                self.kill_node(number)

    def starts(self) -> list[int]:
        """Return the number of ranks of each start so far."""
        return [int(number) for number in MEETING.findall(self.log)]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for an event while at least one node runs.

        Raises:
            CampaignError: It takes too long, or all nodes have ended.
        """

        def is_over() -> bool:
            return all(launcher.poll() is not None for launcher in self.launchers)

        self.wait_until(lambda: condition() or is_over(), what=what)
        if not condition():
            raise CampaignError(f"no {what}: all nodes have ended\n{self.output}")

    def wait_for_steps(self, count: int, *, after: int) -> None:
        """Wait for so many steps since the last resume in `log[after:]`."""
        self.wait_for(lambda: self.has_steps(count, after=after), f"{count} steps")

    def finish_nodes(self) -> None:
        """Let all nodes finish the run.

        Raises:
            CampaignError: One of them fails.
        """
        (self.results / "fast").touch()
        codes = self.wait_for_end([n for i, n in enumerate(self.launchers) if i not in self.lost])
        if any(codes):
            raise CampaignError(f"the nodes ended with exit codes {codes}\n{self.output}")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()]


def samples(results: Path) -> list[tuple[int, int, str]]:
    """Return (number, step, hash) of every sample that any rank read, sorted."""
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
        CampaignError: A sample was skipped or repeated, or a loss differs.
    """
    found, expected = samples(disturbed), samples(undisturbed)
    if found != expected:
        wrong = sorted({*found} ^ {*expected})[:5]
        raise CampaignError(f"{len(found)} samples, not {len(expected)}; different: {wrong}")
    before, after = losses(undisturbed), losses(disturbed)
    if before.keys() != after.keys():
        raise CampaignError(f"different steps: {sorted(before.keys() ^ after.keys())[:9]}")
    worst = max(abs(before[step] - after[step]) for step in before)
    if worst > TOLERANCE:
        raise CampaignError(f"losses must agree to {TOLERANCE}, they differ by {worst}")
    return worst


def lose_and_return(run: ElasticRun, *, victim: int) -> tuple[float, float]:
    """Kill a node and start it again.

    Returns:
        Seconds from its death to the next step, and from its new start to its first step.
    """
    for number in range(run.nodes):
        run.start_node(number)
    full, fewer = run.nodes * run.ranks, (run.nodes - 1) * run.ranks
    run.wait_for(lambda: run.starts() == [full], "start of all nodes")
    run.wait_for_steps(8, after=0)
    before, died = len(run.log), time.monotonic()
    run.kill_node(victim)
    run.wait_for_steps(1, after=before)
    lost = time.monotonic() - died
    assert run.starts()[-1] == fewer
    run.wait_for_steps(3, after=before)
    before, returned = len(run.log), time.monotonic()
    run.start_node(victim)
    run.wait_for(lambda: run.starts()[-1] == full, "second start of all nodes")
    run.wait_for_steps(1, after=before)
    seconds = time.monotonic() - returned
    run.wait_for_steps(3, after=before)
    run.finish_nodes()
    return lost, seconds


def signal_rank(run: ElasticRun, signal_: signal.Signals) -> float:
    """Send a signal to a rank; return the seconds from then to the next step."""
    run.options += ("--comm.train_timeout_seconds=10",)
    for number in range(run.nodes):
        run.start_node(number)
    run.wait_for_steps(8, after=0)
    before, at = len(run.log), time.monotonic()
    os.kill(children(run.launchers[-1].pid)[0], signal_)
    run.wait_for_steps(1, after=before)
    seconds = time.monotonic() - at
    run.finish_nodes()
    return seconds


CASES = {"crash": signal.SIGKILL, "hang": signal.SIGSTOP}


def campaign(options: Namespace, folder: Path) -> str:
    """Disturb the run as `--case` names, and compare."""
    names = ("fewest", "nodes", "ranks", "steps", "seconds")
    run = ElasticRun(folder=folder, **{name: getattr(options, name) for name in names})
    try:
        if options.case == "return":
            victim = options.nodes - 1 if options.victim is None else options.victim
            lost, returned = lose_and_return(run, victim=victim)
            after = f"{lost:.1f} s after the death, {returned:.1f} s after the new start"
        else:
            after = f"{signal_rank(run, CASES[options.case]):.1f} s after the {options.case}"
        worst = compare(run.results, run.train_undisturbed(steps=run.steps, ranks=1))
    finally:
        run.close()
    count = len(samples(run.results))
    return f"{count} samples in order; losses within {worst:.1e}; next step {after}"


def main(argv: Sequence[str]) -> int:
    """Run the campaign and return the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--case", choices=["return", *CASES], default="return")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--fewest", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="per node")
    parser.add_argument("--victim", type=int, help="number of the node to kill (the last)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=300, help="longest wait for an event")
    return run_campaign(campaign, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
