"""The command `layouts`: it finds a wrong layout, continues, and resumes killed ranks elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import benchmark
from scripts.benchmarks import layouts
from scripts.benchmarks.layouts import Trial
from torchtitan.tools.compare.layouts import Result

pytestmark = pytest.mark.usefixtures("warm_starts")


def train(out: Path, name: str) -> tuple[int, dict[str, Any]]:
    code = benchmark.main(["layouts", "--only", name, "--out", str(out)])
    return code, json.loads(out.read_text())["measured"][name]


@pytest.mark.promise("tools")
def test_a_wrong_layout_is_found_and_only_failed_rows_are_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "layouts.json"
    monkeypatch.setitem(layouts.ROWS, "wrong", Trial("tp2 --optimizer.lr=1e-3"))
    code, wrong = train(out, "wrong")
    assert code == 1
    assert wrong["verdict"] == "DIVERGES at step 1"
    out.write_text(out.read_text().replace(wrong["verdict"], "same"))
    code, kept = train(out, "wrong")
    assert code == 0
    assert kept == wrong | {"verdict": "same"}  # with its seconds


@pytest.mark.promise("tools")
def test_killed_ranks_resume_in_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "layouts.json"
    assert train(out, "fsdp2 then tp2")[1]["verdict"] == "same"
    out.unlink()
    finished = Result(layout="fsdp2", num_ranks=2, folder=tmp_path)
    monkeypatch.setattr(layouts, "train_layout", lambda plan, **options: finished)
    for name, end in (("fsdp2 then tp2", "SIGKILL"), ("fsdp2, a rank stopped", "exit code 4")):
        assert end in train(out, name)[1]["problem"]
