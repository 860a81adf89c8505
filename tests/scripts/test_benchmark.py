"""The command runs, and its figures are what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_checkpoint_prints_a_table_writes_json_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    out = tmp_path / "figures.json"
    done = run(
        *("checkpoint", "--size_gib", "0.001", "--pairs", "2"),
        *("--folder", str(tmp_path / "disk"), "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["size_gib"] == 0.001
    for row in figures["comparisons"]:
        assert row["name"] in done.stdout
        pairs = zip(row["ours_s"], row["other_s"], strict=True)
        assert row["ratios"] == pytest.approx([ours / other for ours, other in pairs])
        assert len(row["ratios"]) == 2
        assert min(row["ours_s"] + row["other_s"]) > 0
    names = [row["name"] for row in figures["comparisons"]]
    assert names == ["save / torch.save", "load / torch.load", "blocked by async / sync"]
    assert list((tmp_path / "disk").iterdir()) == []


def test_what_to_measure_must_be_named() -> None:
    done = run()
    assert done.returncode == 2
    assert "WHAT" in done.stderr
