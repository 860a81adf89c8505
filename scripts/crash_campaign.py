"""Kill a run again and again around its saves, and check that no checkpoint is lost.

    python scripts/crash_campaign.py --kills 50

A small job saves every other step, on one and on two ranks, synchronously and asynchronously. Each
start ends with SIGKILL to one rank or to all, at a random moment after one of its first saves or
during the next one. After each kill, every step that was logged as saved must exist undamaged
unless retention has removed it, and the next start must resume from the newest one. At the end the
run is finished and compared, bit for bit, with an undisturbed run. Exit code 0 if all of this
holds, else 1.
"""

from __future__ import annotations

import random
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from scripts.campaign import (
    RESUMED,
    SAVED,
    CampaignError,
    Run,
    build_parser,
    compare_runs,
    kill,
    run_campaign,
    steps_in,
)
from torchtitan.checkpoint.checksums import summarize, verify
from torchtitan.checkpoint.storage import find_steps

KEEP = 3
VARIANTS = [(1, "disabled"), (2, "disabled"), (1, "async"), (2, "async")]
MAX_DELAY, MAX_DELAY_IN_SAVE = 0.15, 0.03


@dataclass(kw_only=True)
class KilledRun(Run):
    """A run whose starts are killed."""

    reported: set[int] = field(default_factory=set)
    """Steps that were logged as saved."""

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints."""
        return self.results / "checkpoint"

    @property
    def is_saving(self) -> bool:
        """Whether an unfinished checkpoint exists."""
        return any(self.checkpoints.glob(".step-*.tmp"))

    def check(self, *, log_before: str) -> None:
        """Check the checkpoints and the step that the last start resumed from.

        Raises:
            CampaignError: A saved step is missing or damaged, or was not resumed from.
        """
        steps = find_steps(self.checkpoints)
        for step in steps:
            if mistakes := verify(self.checkpoints / f"step-{step}", group=None):
                raise CampaignError(f"step {step} is damaged: {summarize(mistakes)}")
        log = self.log[len(log_before) :]
        resumed, newest = steps_in(RESUMED, log), max(self.reported, default=0)
        if self.reported and (not resumed or resumed[0] < newest):
            raise CampaignError(f"step {newest} was saved, the next start resumed from {resumed}")
        self.reported |= set(steps_in(SAVED, log))
        for step in self.reported:
            if step not in steps and sum(other > step for other in steps) < KEEP:
                raise CampaignError(f"step {step} was logged as saved; found {steps}")


def kill_once(run: KilledRun, *, rng: random.Random) -> tuple[str, bool]:
    """Start the run and kill it; return the victim and whether a save was in progress."""
    before, num_saves, waits_for_save = run.log, rng.randint(1, 4), rng.random() < 0.5

    def is_time() -> bool:
        saves = len(SAVED.findall(run.log[len(before) :]))
        return saves >= num_saves and (run.is_saving or not waits_for_save)

    ranks = run.start()
    try:
        run.wait_until(is_time, what=f"save number {num_saves}", processes=ranks)
        time.sleep(rng.uniform(0, MAX_DELAY_IN_SAVE if waits_for_save else MAX_DELAY))
        victims = ranks if rng.random() < 0.5 else [rng.choice(ranks)]
        for rank in victims:
            rank.kill()
        is_saving = run.is_saving
        run.wait_for_end(ranks)  # the other ranks notice by themselves
    finally:
        kill(ranks)
    run.check(log_before=before)
    who = "all" if len(victims) == len(ranks) else "one rank"
    return who, is_saving


def disturb(folder: Path, *, ranks: int, mode: str, kills: int, rng: random.Random) -> str:
    """Kill the run of one variant `kills` times, finish it, and compare; return a summary."""
    options = (
        "--checkpoint.interval=2",
        f"--checkpoint.keep_latest_k={KEEP}",
        f"--checkpoint.async_mode={mode}",
        "--comm.init_timeout_seconds=60",
    )
    run = KilledRun(folder=folder / f"{ranks}-{mode}", ranks=ranks, options=options, seconds=120)
    num_in_save = 0
    for number in range(1, kills + 1):
        who, is_saving = kill_once(run, rng=rng)
        num_in_save += is_saving
        newest = max(find_steps(run.checkpoints))
        during = " during a save" if is_saving else ""
        print(f"{number}/{kills}: killed {who}{during}; newest step {newest}", flush=True)
    # beyond all steps so far, so that the last step is a save of its own
    steps, before = max(find_steps(run.checkpoints)) + 5, run.log
    run.finish(run.start(steps=steps))
    run.check(log_before=before)
    compare_runs(run.train_undisturbed(steps=steps, ranks=ranks), run.results)
    return f"{ranks} ranks, {mode}: {kills} kills, {num_in_save} during a save; {steps} steps equal"


def campaign(options: Namespace, folder: Path) -> str:
    """Run all variants."""
    rng = random.Random(options.seed)
    for index, (ranks, mode) in enumerate(VARIANTS):
        kills = options.kills // len(VARIANTS) + (index < options.kills % len(VARIANTS))
        if kills:
            print(disturb(folder, ranks=ranks, mode=mode, kills=kills, rng=rng), flush=True)
    return f"no checkpoint lost in {options.kills} kills"


def main(argv: Sequence[str]) -> int:
    """Run the campaign and return the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50, help="over all variants")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    return run_campaign(campaign, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
