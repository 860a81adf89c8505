"""Kill a training run again and again, around its saves, and prove that nothing is lost.

    python scripts/crash_campaign.py --kills 50

A small job saves every few steps, for one rank and for two, in the loop and in the background. Each
of its lives ends by SIGKILL to one rank or to all, a random moment after one of its first saves or
within the next one. After every life each step that the log reported as saved must be there whole,
unless retention has replaced it, and the next life must go on from the newest. At the end the run
is finished and compared, bit for bit, with one that was never killed. Exit code 0 if all of that
holds, 1 if not.

The ranks are started here, without a launcher, so that one of them can be killed alone: the others
then find out by themselves, in the middle of a step or of a save.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # works without being installed

from scripts.ports import hold_port
from torchtitan.checkpoint.checksums import summarize, verify
from torchtitan.checkpoint.storage import find_steps

TINY = """
[model]
flavor = "tiny"
tokenizer_path = "byte"
[training]
dataset = "synthetic_masked"
seq_len = 32
local_batch_size = 2
global_batch_size = 8
steps = 20
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 5
total_steps = 20
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = 100
"""
KEEP = 3
VARIANTS = [(1, "disabled"), (2, "disabled"), (1, "async"), (2, "async")]
SECONDS_TO_SAVE, SECONDS_TO_END = 120, 60
MAX_DELAY, MAX_DELAY_IN_SAVE = 0.15, 0.03
SAVED, RESUMED = re.compile(r"Saved \S*step-(\d+)"), re.compile(r"Resumed from \S*step-(\d+)")
STEP = re.compile(r"step: +(\d+)")


class CampaignError(Exception):
    """A run lost something, or did not train."""


@dataclass
class Run:
    """One run of many lives."""

    folder: Path
    world: int
    mode: str
    reported: set[int] = field(default_factory=set)
    """Steps that the log reported as saved."""
    place: socket.socket | None = None
    """Holds the port at which the ranks of this life meet."""

    def start(self, *, steps: int) -> list[subprocess.Popen[bytes]]:
        """Start every rank; their output goes to a file each."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "job.toml"
        config.write_text(TINY)
        command = [sys.executable, "-m", "torchtitan.train", f"--job.config_file={config}"]
        command += [f"--training.steps={steps}", "--lr_scheduler.total_steps=1000000"]
        command += ["--checkpoint.interval=2", f"--checkpoint.keep_latest_k={KEEP}"]
        command += [f"--checkpoint.async_mode={self.mode}"]
        command += [f"--job.dump_folder={self.folder / 'run'}", "--comm.init_timeout_seconds=60"]
        command += [f"--training.dataset_cache={self.folder.parent / 'cache'}"]
        if self.place is not None:
            self.place.close()
        self.place = hold_port()
        return start_ranks(command, world=self.world, place=self.place, folder=self.folder)

    @property
    def log(self) -> str:
        """The log of rank 0, all lives."""
        path = self.folder / "run" / "logs" / "rank_0.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written, or was when its writers died."""
        return any((self.folder / "run" / "checkpoint").glob(".step-*.tmp"))

    @property
    def output(self) -> str:
        """The end of what each rank of the last life wrote."""
        return "\n".join(p.read_text()[-2000:] for p in sorted(self.folder.glob("output_*.txt")))

    def check(self, *, log_before: str) -> None:
        """Check what a life left behind, to the last byte, and where it had started.

        Raises:
            CampaignError: A step reported as saved is gone or damaged, or was not gone on from.
        """
        checkpoints = self.folder / "run" / "checkpoint"
        here = find_steps(checkpoints)
        for step in here:
            if mistakes := verify(checkpoints / f"step-{step}", group=None):
                raise CampaignError(f"step {step} is not whole: {summarize(mistakes)}")
        life = self.log[len(log_before) :]
        resumed = [int(step) for step in RESUMED.findall(life)]
        newest = max(self.reported, default=0)
        if self.reported and (not resumed or resumed[0] < newest):
            raise CampaignError(f"step {newest} was saved, the next life went on from {resumed}")
        self.reported |= {int(step) for step in SAVED.findall(life)}
        for step in self.reported:
            if step not in here and sum(other > step for other in here) < KEEP:
                raise CampaignError(f"step {step} was reported as saved; found {here} alone")


def start_ranks(
    command: Sequence[str],
    *,
    world: int,
    place: socket.socket,
    folder: Path,
    more: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start `command` on every rank, without a launcher, to meet at the port that `place` holds;
    their output goes to a file each in `folder`. `more`: variables for all of them."""
    shared: dict[str, object] = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": 1, "WORLD_SIZE": world}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.getsockname()[1], **(more or {})}
    ranks = []
    for rank in range(world):
        variables = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        environ = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        with (folder / f"output_{rank}.txt").open("wb") as output:
            ranks.append(subprocess.Popen(command, env=environ, stdout=output, stderr=output))
    return ranks


def live_and_die(run: Run, *, rng: random.Random) -> tuple[str, bool]:
    """Start the run, kill it around a save; return who was killed and whether within a save."""
    before, saves = run.log, rng.randint(1, 4)
    ranks = run.start(steps=1_000_000)
    try:
        deadline = time.monotonic() + SECONDS_TO_SAVE
        within_next = rng.random() < 0.5
        while len(SAVED.findall(run.log[len(before) :])) < saves or (
            within_next and not run.is_saving
        ):
            if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
                raise CampaignError(f"a life ended before its save number {saves}:\n{run.output}")
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, MAX_DELAY_IN_SAVE if within_next else MAX_DELAY))
        victims = ranks if rng.random() < 0.5 else [rng.choice(ranks)]
        for rank in victims:
            rank.kill()
        within = run.is_saving
        deadline = time.monotonic() + SECONDS_TO_END
        for rank in ranks:
            rank.wait(timeout=max(0.1, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    run.check(log_before=before)
    who = "all" if len(victims) == len(ranks) else f"rank {ranks.index(victims[0])}"
    return who, within


def finish(run: Run, *, steps: int) -> None:
    """Train to `steps` undisturbed."""
    before = run.log
    codes = [rank.wait() for rank in run.start(steps=steps)]
    if any(codes):
        raise CampaignError(f"the run ended with {codes}:\n{run.output}")
    run.check(log_before=before)


def campaign(folder: Path, *, world: int, mode: str, kills: int, rng: random.Random) -> str:
    """Kill one variant's run `kills` times, finish it, and compare; return what came of it."""
    run = Run(folder / f"killed-{world}-{mode}", world, mode)
    num_within = 0
    for number in range(1, kills + 1):
        who, within = live_and_die(run, rng=rng)
        num_within += within
        newest = max(find_steps(run.folder / "run" / "checkpoint"))
        print(
            f"world {world}, {mode}: kill {number}/{kills} of {who}"
            f"{' within a save' if within else ''}; whole up to step {newest}",
            flush=True,
        )
    # a step further than any life has come, so that the end is a save of its own
    steps = max(find_steps(run.folder / "run" / "checkpoint")) + 5
    finish(run, steps=steps)
    whole = Run(folder / f"whole-{world}-{mode}", world, mode)
    finish(whole, steps=steps)
    compare_runs(whole.folder / "run", run.folder / "run")
    return f"world {world}, {mode}: {kills} kills, {num_within} within a save; {steps} steps, equal"


def compare_runs(undisturbed: Path, disturbed: Path) -> None:
    """Compare every logged figure and every tensor of two runs, bit for bit.

    Raises:
        CampaignError: They differ.
    """
    script = str(ROOT / "scripts" / "compare_runs.py")
    command = [sys.executable, script, str(undisturbed), str(disturbed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CampaignError(f"the runs differ:\n{done.stdout}{done.stderr}")


def main(argv: Sequence[str]) -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="lives to end, over all variants")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--folder", type=Path, help="keep everything here, else it is deleted")
    options = parser.parse_args(argv)
    rng = random.Random(options.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            for index, (world, mode) in enumerate(VARIANTS):
                kills = options.kills // len(VARIANTS) + (index < options.kills % len(VARIANTS))
                if kills:
                    folder = options.folder or Path(temporary)
                    print(campaign(folder, world=world, mode=mode, kills=kills, rng=rng))
        except CampaignError as error:
            sys.stderr.write(f"failed: {error}\n")
            return 1
    print(f"nothing lost in {options.kills} kills, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
