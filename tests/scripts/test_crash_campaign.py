"""Three of the campaign's kills, and the errors for runs that lost a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from scripts.campaign import CampaignError
from scripts.crash_campaign import KilledRun, disturb
from torchtitan.checkpoint.checksums import seal, write_bytes


@pytest.mark.promise("kill-save")
@pytest.mark.usefixtures("warm_starts")
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("ranks", "mode", "kills"), [(1, "disabled", 1), (2, "async", 2)])
@pytest.mark.long
def test_no_checkpoint_is_lost(ranks: int, mode: str, kills: int, tmp_path: Path) -> None:
    found = disturb(tmp_path, ranks=ranks, mode=mode, kills=kills, rng=random.Random(1))
    assert found.endswith("equal")


@pytest.fixture
def run(tmp_path: Path) -> KilledRun:
    return KilledRun(folder=tmp_path)


def write_start(run: KilledRun, log: str, *steps: int) -> None:
    """Write the log and the undamaged checkpoints of a start."""
    (run.results / "logs").mkdir(parents=True, exist_ok=True)
    with (run.results / "logs" / "rank_0.log").open("a") as file:
        file.write(log)
    for step in steps:
        (run.checkpoints / f"step-{step}").mkdir(parents=True)
        write_bytes(run.checkpoints / f"step-{step}" / "manifest.json", seal({"files": {}}))


@pytest.mark.promise("kill-save")
def test_a_lost_checkpoint_is_found(run: KilledRun) -> None:
    write_start(run, "Saved x/step-2\nSaved x/step-4\n", 2)
    with pytest.raises(CampaignError, match=r"4.*\[2\]"):
        run.check(log_before="")


def test_a_damaged_checkpoint_is_found(run: KilledRun) -> None:
    write_start(run, "Saved x/step-2\n", 2)
    path = run.checkpoints / "step-2" / "manifest.json"
    path.write_text(path.read_text().replace("files", "Files"))
    with pytest.raises(CampaignError, match=r"step 2 .*manifest\.json"):
        run.check(log_before="")


def test_retention_is_no_loss(run: KilledRun) -> None:
    write_start(run, "".join(f"Saved x/step-{s}\n" for s in (2, 4, 6, 8)), 4, 6, 8)
    run.check(log_before="")


@pytest.mark.promise("kill-save")
@pytest.mark.parametrize("log", ["Resumed from x/step-2\n", ""])
def test_an_older_resume_is_found(log: str, run: KilledRun) -> None:
    write_start(run, "Saved x/step-2\nSaved x/step-4\n", 2, 4)
    run.check(log_before="")
    before = run.log
    write_start(run, log, 6)
    with pytest.raises(CampaignError, match="step 4 "):
        run.check(log_before=before)


def test_steps_are_counted_since_the_last_resume(run: KilledRun) -> None:
    write_start(run, "step:  1\nstep:  2\n")
    after = len(run.log)
    assert run.has_steps(2, after=0)
    assert not run.has_steps(0, after=after)
    write_start(run, "step:  3\nResumed from x/step-2\nstep:  3\n")
    assert run.has_steps(1, after=after)
    assert not run.has_steps(2, after=after)
