"""A few bugs planted by the command, with real launches; all of them: `plant_campaign.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchtitan.audit.__main__ import main
from torchtitan.audit.plants import PLANTS

pytestmark = pytest.mark.usefixtures("warm_starts")

TOML = Path(__file__).parents[2] / "train_configs" / "compare_layouts.toml"
BUGS = "labels_shifted_in_cp_shard,norm_of_own_shard,tied_copy_stale,optimizer_not_restored"


def test_bugs_are_caught_or_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One is caught, one cannot occur, and the comparison is made blind for one."""
    file = tmp_path / "found.json"
    words = ["--steps=4", f"--bugs={BUGS}", f"--json={file}", "--grad_norm_tolerance=1e9"]
    words.append(f"--training.dataset_cache={tmp_path / 'cache'}")
    code = main(["compare", "--plant", str(TOML), "single", "cp2", *words])
    said = capsys.readouterr()
    assert code == 1, said.out + said.err
    found = {(x["bug"], x["layout"]): x for x in json.loads(file.read_text())["bugs"]}
    steps = {key: x["steps"] for key, x in found.items()}
    assert not any(x["problem"] for x in found.values())
    assert steps.keys() == {
        ("labels_shifted_in_cp_shard", "cp2"),
        ("norm_of_own_shard", "cp2"),
        ("optimizer_not_restored", "single"),
        ("optimizer_not_restored", "cp2"),
    }
    assert steps["labels_shifted_in_cp_shard", "cp2"]["loss"] == 1
    assert steps["norm_of_own_shard", "cp2"] == {}
    for layout in ("single", "cp2"):
        resumed = steps["optimizer_not_restored", layout]
        # the first step after the resume starts from right weights
        assert (resumed["loss"], resumed["optimizer"]) == (4, 4)
        assert "start" not in resumed
    assert "NOT CAUGHT: norm_of_own_shard in cp2" in said.out
    assert "tied_copy_stale cannot occur here: no pipeline in cp2" in said.out


def test_a_layout_that_differs_by_itself_shows_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["single", "single --optimizer.weight_decay=0.5", "--steps=2", "--bugs=lr_late"]
    cache = f"--training.dataset_cache={tmp_path / 'cache'}"
    assert main(["compare", "--plant", str(TOML), *words, cache]) == 1
    said = capsys.readouterr().out
    assert "NOTHING SHOWN for single --optimizer.weight_decay=0.5: it differs" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bugs=lr_lat"], "did you mean 'lr_late'?"),
        (["--steps=1"], "--steps must be at least 2"),
        (["--verbose"], "--verbose is of `compare layouts`"),
        (["--routing=free"], "--routing cannot be set here"),
    ],
)
def test_mistakes_cost_no_training(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--plant", str(TOML), "fsdp2", *words]) == 2
    assert message in capsys.readouterr().err


def test_each_bug_says_what_it_is() -> None:
    for name, plant in PLANTS.items():
        assert plant.put.__doc__, name
    assert len(PLANTS) >= 12
