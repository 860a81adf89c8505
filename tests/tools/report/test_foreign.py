"""Runs that other hands wrote or damaged: every tool gives a page, or exit code 2 and a message."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.report.test_report import write_run
from torchtitan.tools.hang import main as hang
from torchtitan.tools.report.command import main as report

START = {"event": "start", "time": "2026", "step": 0, "layout": "tp 2", "config": ""}
START |= {"world_size": 2, "resumed_from": 0, "ranks_per_machine": 2, "device": "cpu"}


def appended(file: str, row: object) -> Callable[[Path], object]:
    """Return what puts a line behind those of a file, and one of the run's own behind it."""

    def harm(run: Path) -> None:
        with (run / file).open("a") as opened:
            opened.write(json.dumps(row) + "\n" + json.dumps(START | {"step": 50}) + "\n")

    return harm


def replaced(file: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / file).write_text(text)


def pipe(file: str) -> Callable[[Path], object]:
    def harm(run: Path) -> None:
        (run / file).unlink(missing_ok=True)
        os.mkfifo(run / file)

    return harm


REFUSED = {
    "metrics: a loss in quotes": (appended("metrics.jsonl", {"step": 41, "loss": "1"}), "loss"),
    "metrics: a loss as a list": (appended("metrics.jsonl", {"step": 41, "loss": [1]}), "loss"),
    "metrics: a list": (appended("metrics.jsonl", [1]), "metrics.jsonl"),
    "metrics: a step that is true": (appended("metrics.jsonl", {"step": True}), "True|true"),
    "metrics: a negative step": (appended("metrics.jsonl", {"step": -1}), "-1"),
    "metrics: a pipe": (pipe("metrics.jsonl"), "metrics.jsonl"),
    "events: a list": (appended("events.jsonl", [1]), "events.jsonl"),
    "events: no event": (appended("events.jsonl", {"step": 1, "time": "x"}), "event"),
    "events: no time": (appended("events.jsonl", {"step": 1, "event": "x"}), "time"),
    "events: a list for an event": (appended("events.jsonl", START | {"event": []}), "event"),
    "events: a spike in quotes": (
        appended(
            "events.jsonl",
            START | {"event": "spike", "figure": "loss", "action": "", "value": "9", "bound": 1.0},
        ),
        "value",
    ),
    "events: a pipe": (pipe("events.jsonl"), "events.jsonl"),
}
SHOWN = {
    "metrics: no loss": appended("metrics.jsonl", {"step": 41, "loss": None, "num_tokens": None}),
    "metrics: NaN": appended("metrics.jsonl", {"step": 41, "loss": float("nan")}),
    "metrics: infinity": appended("metrics.jsonl", {"step": 41, "loss": float("inf")}),
    "metrics: a huge number": appended("metrics.jsonl", {"step": 41, "loss": 10**400}),
    "events: an infinite spike": appended(
        "events.jsonl",
        START
        | {"event": "spike", "figure": "loss", "action": "", "value": float("inf"), "bound": 1.0},
    ),
    "events: an event of a later version": appended("events.jsonl", START | {"event": "new"}),
    "settings: a pipe": pipe("config.toml"),
    "settings: not TOML": replaced("config.toml", "\0"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_cannot_be_shown_is_named(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, said = REFUSED[which]
    harm(write_run(tmp_path / "run"))
    assert report([str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("which", SHOWN)
def test_the_rest_is_shown_all_the_same(which: str, tmp_path: Path) -> None:
    SHOWN[which](write_run(tmp_path / "run"))
    out = tmp_path / "report.html"
    assert report([str(tmp_path / "run"), "--out", str(out)]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON: a browser would draw nothing")

    [data] = re.findall(r'<script [^>]*id="data">(.*?)</script>', out.read_text(), re.DOTALL)
    page = json.loads(data, parse_constant=refuse)
    losses = next(panel for panel in page["panels"] if panel["title"] == "loss")
    assert len(losses["curves"][0]["values"]) == 40


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", "config.toml"])
def test_no_tool_waits_at_a_pipe(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    pipe(file)(run)
    code = report([str(run), "--out", str(tmp_path / "report.html")])
    assert code == (0 if file == "config.toml" else 2)  # the pictures of a pipeline are left out
    if file == "config.toml":
        assert hang([str(run)]) == 2
        assert "config.toml" in capsys.readouterr().err


RECORD = {
    "pg_config": {"0": {"desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {
            "is_p2p": False,
            "process_group": ["0", "default_pg"],
            "input_sizes": [[2]],
            "collective_seq_id": 1,
            "profiling_name": "gloo:all_reduce",
            "time_created_ns": 1,
            "frames": [{"filename": "a.py", "line": 1, "name": "f"}],
        }
    ],
}
CRAFTED: dict[str, object] = {
    "a list": [1],
    "no groups": RECORD | {"pg_config": []},
    "ranks that are lists": RECORD | {"pg_config": {"0": {"desc": "a", "ranks": "[[0]]"}}},
    "a time beyond the calendar": RECORD
    | {"entries": [RECORD["entries"][0] | {"time_created_ns": 10**40}]},  # type: ignore[index]
    "no group of an entry": RECORD | {"entries": [RECORD["entries"][0] | {"process_group": []}]},  # type: ignore[index]
}


@pytest.mark.parametrize("which", ["whole", "a pipe", *CRAFTED])
def test_crafted_records_of_a_hang_are_refused(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "comm_traces").mkdir()
    record = tmp_path / "comm_traces" / "gloo_0"
    if which == "a pipe":
        os.mkfifo(record)
    else:
        record.write_bytes(pickle.dumps(RECORD if which == "whole" else CRAFTED[which]))
    assert hang([str(tmp_path)]) == (0 if which == "whole" else 2)
    assert which == "whole" or "gloo_0" in capsys.readouterr().err
