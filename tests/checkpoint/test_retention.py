"""Which checkpoints stay, by what their manifests say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from torchtitan.checkpoint.checksums import find_manifest, seal, write_bytes
from torchtitan.checkpoint.manager import steps_to_delete

ABOUT = {"components": [], "layout": {}, "config": ""}


def describe_score(loss: float, *, data: str) -> dict[str, Any]:
    return {"validation": {"loss": loss, "data": data}}


def write(folder: Path, step: int, **more: Any) -> None:
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    write_bytes(path / "manifest.json", seal({"step": step, **ABOUT, **more}))


def test_the_lowest_loss_comes_first_on_these_data_alone(tmp_path: Path) -> None:
    scores: Mapping[int, dict[str, Any]] = {
        1: describe_score(2.0, data="a"),
        2: describe_score(1.5, data="a"),
        3: describe_score(1.0, data="b"),  # of other data
        4: {},  # not validated
        5: {"validation": {"loss": "low", "data": "a"}},
        6: describe_score(1.5, data="a"),  # as good as step 2, and newer
        7: {"validation": 0.1},
    }
    for step, more in scores.items():
        write(tmp_path, step, **more)
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-8" / "manifest.json").write_text("no JSON")
    deleted = steps_to_delete(
        [*scores, 8],
        lambda step: find_manifest(tmp_path / f"step-{step}"),
        keep_latest=1,
        keep_best=2,
        data="a",
    )
    assert deleted == [1, 3, 4, 5, 7]


@pytest.mark.promise("one-run-per-folder")
@pytest.mark.parametrize(
    ("keep_latest", "best", "expected"),
    [(2, [], [1, 2, 3]), (2, [2], [1, 3]), (2, [5, 1], [2, 3]), (0, [2], []), (9, [], [])],
)
def test_latest_and_best_stay(keep_latest: int, best: list[int], expected: list[int]) -> None:
    def manifest_of(step: int) -> dict[str, Any]:
        return describe_score(float(best.index(step)), data="a") if step in best else {}

    deleted = steps_to_delete(
        [1, 2, 3, 4, 5], manifest_of, keep_latest=keep_latest, keep_best=len(best), data="a"
    )
    assert deleted == expected
