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


@pytest.mark.promise("kill-save")
@pytest.mark.parametrize("log", ["Resumed from x/step-2\n", ""])
def test_an_older_resume_is_found(log: str, run: KilledRun) -> None:
    write_start(run, "Saved x/step-2\nSaved x/step-4\n", 2, 4)
    run.check(log_before="")
    before = run.log
    write_start(run, log, 6)
    with pytest.raises(CampaignError, match="step 4 "):
        run.check(log_before=before)
