"""The command runs, and its figures are what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmark import main
from scripts.benchmarks import loss

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_compares_results_times_and_peaks(dtype: str, tmp_path: Path) -> None:
    """Whole logits take three times their size; a 16th of that leaves room for what else there is,
    which counts for much at so small a size."""
    out = tmp_path / "figures.json"
    sizes = ("--seq_len", "1024", "--vocab_size", "8192", "--width", "32", "--chunks", "16")
    done = run("loss", *sizes, "--dtype", dtype, "--pairs", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["chunk_size"] == 64
    assert figures["logits_bytes"] == 4 * 1024 * 8192
    assert figures["peak_bytes"]["other"] > 2 * figures["logits_bytes"]
    assert 0 < figures["peak_bytes"]["ours"] < figures["logits_bytes"]
    assert 0 <= figures["gaps"]["dweight"] < 0.01
    for row in figures["comparisons"]:
        assert row["name"] in done.stdout
        assert len(row["ratios"]) == 2


def test_results_that_differ_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    correct = loss.Case.loss
    monkeypatch.setattr(
        loss.Case,
        "loss",
        lambda self, *, is_ours: (
            lambda *tensors: correct(self, is_ours=is_ours)(*tensors) * (1.001 if is_ours else 1)
        ),
    )
    sizes = ["--seq_len=16", "--vocab_size=32", "--width=8", "--pairs=1", "--threads=1"]
    assert main(["loss", *sizes]) == 1
    assert "dweight 1.0e-03" in capsys.readouterr().out


def test_what_to_measure_must_be_named() -> None:
    done = run()
    assert done.returncode == 2
    assert "WHAT" in done.stderr
