"""Three of the campaign's kills, and what it says of a run that did lose a checkpoint."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from torchtitan.checkpoint.checksums import write_sealed_json

pytestmark = pytest.mark.usefixtures("warm_starts")

SCRIPT = Path(__file__).parents[2] / "scripts" / "crash_campaign.py"


@pytest.fixture(scope="module")
def crash() -> ModuleType:
    spec = importlib.util.spec_from_file_location("crash_campaign", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["crash_campaign"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("world", "mode", "kills"), [(1, "disabled", 1), (2, "async", 2)])
@pytest.mark.long
def test_nothing_is_lost(
    world: int, mode: str, kills: int, crash: ModuleType, tmp_path: Path
) -> None:
    rng = random.Random(1)
    said = crash.campaign(tmp_path, world=world, mode=mode, kills=kills, rng=rng)
    assert f"{kills} kills" in said
    assert said.endswith("equal")


def a_life(run: object, *, log: str, found: tuple[int, ...]) -> None:
    """Leave what a life leaves: its log, and whole checkpoints."""
    folder = run.folder / "run"  # type: ignore[attr-defined]
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with (folder / "logs" / "rank_0.log").open("a") as file:
        file.write(log)
    for step in found:
        (folder / "checkpoint" / f"step-{step}").mkdir(parents=True)
        manifest = folder / "checkpoint" / f"step-{step}" / "manifest.json"
        write_sealed_json(manifest, {"files": {}})


def test_a_lost_checkpoint_is_found(crash: ModuleType, tmp_path: Path) -> None:
    run = crash.Run(tmp_path / "a", 1, "async")
    a_life(run, log="Saved x/step-2\nSaved x/step-4\n", found=(2,))
    with pytest.raises(crash.CampaignError, match=r"step 4 was reported as saved; found \[2\]"):
        run.check(log_before="")


def test_a_damaged_checkpoint_is_found(crash: ModuleType, tmp_path: Path) -> None:
    run = crash.Run(tmp_path / "a", 1, "async")
    a_life(run, log="Saved x/step-2\n", found=(2,))
    path = tmp_path / "a" / "run" / "checkpoint" / "step-2" / "manifest.json"
    path.write_text(path.read_text().replace("files", "Files"))
    with pytest.raises(
        crash.CampaignError, match=r"step 2 is not whole: manifest\.json is damaged"
    ):
        run.check(log_before="")


def test_retention_is_no_loss(crash: ModuleType, tmp_path: Path) -> None:
    run = crash.Run(tmp_path / "a", 1, "async")
    a_life(run, log="".join(f"Saved x/step-{s}\n" for s in (2, 4, 6, 8)), found=(4, 6, 8))
    run.check(log_before="")


@pytest.mark.parametrize("log", ["Resumed from x/step-2\n", ""])
def test_a_life_that_did_not_go_on_from_the_newest(
    log: str, crash: ModuleType, tmp_path: Path
) -> None:
    run = crash.Run(tmp_path / "a", 1, "async")
    a_life(run, log="Saved x/step-2\nSaved x/step-4\n", found=(2, 4))
    run.check(log_before="")
    before = run.log
    a_life(run, log=log, found=(6,))
    with pytest.raises(crash.CampaignError, match="step 4 was saved, the next life went on from"):
        run.check(log_before=before)
