"""The memory of one sequence length after another; docs/long_context.md runs it for real."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import memory_curve

pytestmark = pytest.mark.usefixtures("warm_starts")

CONFIG = Path(__file__).parents[2] / "train_configs" / "long_context_128k.toml"


def test_what_grows_is_told_from_what_is_there_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(config: Path, seq_len: int, *, ranks: int, settings: Sequence[str]) -> list[float]:
        assert "--training.steps=1" in settings
        assert "--debug.seed=3" in settings
        # half a GiB of process, and a quadratic part; the first rank takes a little less
        high = 0.5 + seq_len / 2**16 + (seq_len / 2**16) ** 2
        return [high - 0.01 * (rank < ranks - 1) for rank in range(ranks)]

    monkeypatch.setattr(memory_curve, "measure", measure)
    out, plot = tmp_path / "curve.json", tmp_path / "curve.svg"
    words = [str(CONFIG), "--seq_lens", "65536", "32768", "--debug.seed=3", "--ranks", "3"]
    assert memory_curve.main([*words, "--out", str(out), "--plot", str(plot)]) == 0
    short = 0.5 + 1 / 64 + 1 / 64**2
    figures = json.loads(out.read_text())
    assert figures["short_gib"] == pytest.approx(short)
    first, second = figures["points"]
    assert (first["seq_len"], second["seq_len"]) == (32768, 65536)
    assert second["peak_gib"] == pytest.approx([2.49, 2.49, 2.5])
    assert first["above_short_gib"] == pytest.approx(1.25 - short)
    printed = capsys.readouterr().out
    assert f"grown {(2.5 - short) / (1.25 - short):.2f}x (with all of the process 2.00x)" in printed
    assert plot.read_text().startswith("<?xml")


def test_a_job_that_fails_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(CONFIG), "--ranks", "1", "--training.dataset=none"]
    assert memory_curve.main(words) == 1
    error = capsys.readouterr().err
    assert "--training.dataset none" in error
    assert "ended with code 2" in error
