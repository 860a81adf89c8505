"""The page about runs: whole in itself, safe whatever a run is called, and drawn by a browser."""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

from torchtitan.metrics.events import EventLog
from torchtitan.tools.report.command import main
from torchtitan.tools.report.read import name_runs, read_figures, thinned

ATTACK = "</script><img src=x onerror=alert(1)>\x1b[31m"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def write_run(folder: Path, *, steps: int = 40, spike_at: int = 17) -> Path:
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 9.0 if step == spike_at else 2 + math.exp(-step / 20)
            row = {"step": step, "loss": loss, "grad_norm": 1 / step, "lr": 1e-3, "mfu": None}
            row |= {"tokens_per_second": 1e5, "step_time_s": 0.1, "data_time_s": 0.01}
            file.write(json.dumps(row | {"num_tokens": step * 64}) + "\n")
    events, start = EventLog(folder), {"layout": "dp_shard 2", "world_size": 2}
    start |= {"resumed_from": 0, "ranks_per_machine": 2, "device": "cpu"}
    events.write("start", step=0, config="[optimizer]\nlr = 0.1", **start)
    events.write("checkpoint", step=20, folder="checkpoint/step-20")
    spike = {"figure": "loss", "value": 9.0, "bound": 3.0, "action": "skip"}
    events.write("spike", step=spike_at, **spike)
    events.write("end", step=20, reason=ATTACK)
    events.write("start", step=20, config="[optimizer]\nlr = 0.2", **start)
    return folder


class Page(HTMLParser):
    """Tags, attributes and texts of a page, in which each element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes, self.tags, self.texts = set[str](), set[str](), list[str]()
        self._open = list[str]()
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "input", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.promise("tools")
def test_the_page_is_whole_and_safe(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("one\x1b[2J", "<img src=x onerror=alert(1)>")]
    out = tmp_path / "report.html"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    text = out.read_text()
    page = Page(text)
    assert "img" not in page.tags
    assert not {"src", "href", "onerror"} & page.attributes
    assert "ended: " + ATTACK.replace("\x1b", "\\x1b") in page.texts
    assert "\x1b" not in text
    assert "optimizer.lr: 0.1 \u2192 0.2" in page.texts
    assert any(text.startswith("spike: loss 9 above 3") for text in page.texts)
    # nothing is fetched: the only address is the one of the library's own page, in a comment
    addresses = [part for part in text.split("https://")[1:] if "w3.org" not in part[:20]]
    assert all(part.startswith("github.com/leeoniya/uPlot") for part in addresses)


def test_thinning_keeps_ends_and_spikes() -> None:
    draw = random.Random(5)
    points = {step: draw.random() for step in range(100_000)} | {54_321: 50.0, 54_322: -50.0}
    steps, values = thinned(*map(np.array, ([*points], [*points.values()])), num_buckets=2000)
    assert len(steps) <= 4002
    assert steps == sorted(steps)
    assert {0, 54_321, 54_322, 99_999} < {*steps}
    assert values == [points[step] for step in steps]


class StoredRow(dict[str, Any]):
    """A row that can be referred to weakly."""


@pytest.mark.promise("tools")
def test_figures_are_those_of_the_rows_and_no_row_is_kept() -> None:
    """The oracle keeps all rows: of each step the newest finite value."""
    draw, read_so_far = random.Random(3), list[ref[StoredRow]]()
    drawn = (1.5, -2.0, 10**400, math.nan, math.inf, None)
    rows: list[dict[str, float | None]] = [
        {"step": draw.randrange(300)}
        | {name: draw.choice(drawn) for name in draw.sample("abcd", 2)}
        for _ in range(600)
    ]
    most = 0

    def read() -> Iterator[StoredRow]:
        nonlocal most
        for row in rows:
            stored = StoredRow(row)
            read_so_far.append(ref(stored))
            most = max(most, sum(one() is not None for one in read_so_far))
            yield stored

    figures = read_figures(read(), "abcde")
    assert figures is not None
    assert most <= 2
    assert figures.last == rows[-1]
    assert set(figures.values) == set("abcd")
    for name in "abcde":
        finite = [
            (row["step"], value)
            for row in rows
            if (value := row.get(name)) is not None and abs(value) < 10
        ]
        newest = dict(sorted(dict(finite).items(), key=lambda item: item[0] or 0))
        assert figures.curve(name) == ([*newest], [*newest.values()])
        assert figures.newest(name) == (finite[-1][1] if finite else None)
    assert read_figures([], "abc") is None


def test_names() -> None:
    paths = [Path("a", "run"), Path("b", "run"), Path("a", "run")]
    assert [*name_runs(paths)] == ["a/run", "b/run"]


START = {"event": "start", "time": "2026", "step": 0, "layout": "tp 2", "config": ""}
START |= {"world_size": 2, "resumed_from": 0, "ranks_per_machine": 2, "device": "cpu"}
SPIKE = START | {"event": "spike", "figure": "loss", "action": "", "bound": 1.0}
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


@pytest.mark.parametrize(
    ("file", "row", "named"),
    [
        (METRICS, {"step": 41, "loss": "1"}, "loss"),
        (METRICS, {"step": -1}, "-1"),
        (METRICS, None, METRICS),
        (EVENTS, {"step": 1, "event": "x"}, "time"),
        (EVENTS, SPIKE | {"value": "9"}, "value"),
        (EVENTS, None, EVENTS),
        # shown all the same
        (METRICS, {"step": 41, "loss": float("nan"), "num_tokens": None}, ""),
        (EVENTS, SPIKE | {"value": float("inf")}, ""),
        (EVENTS, START | {"event": "new"}, ""),
        ("config.toml", "\0", ""),
        ("config.toml", None, ""),
    ],
)
def test_files_of_strangers(file, row, named, tmp_path, capsys):
    """Each is named, or the rest is shown; no pipe (None) is waited at."""
    path, out = write_run(tmp_path / "run") / file, tmp_path / "report.html"
    if row is None:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    else:
        with path.open("a") as opened:
            # an incomplete last row would be left out
            opened.write(f"{json.dumps(row)}\n{json.dumps(START | {'step': 50})}\n")
    assert main([str(path.parent), "--out", str(out)]) == (2 if named else 0)
    assert named in capsys.readouterr().err
    if not named:
        [data] = re.findall(r'<script [^>]*id="data">(.*?)</script>', out.read_text(), re.DOTALL)
        # other constants are no JSON: a browser would draw nothing
        page = json.loads(data, parse_constant=lambda constant: pytest.fail(constant))
        losses = next(panel for panel in page["panels"] if panel["title"] == "loss")
        assert len(losses["curves"][0]["values"]) == 40


def test_a_link_at_the_name_of_the_draft_is_not_followed(tmp_path):
    run, out = write_run(tmp_path / "run"), tmp_path / "report.html"
    (tmp_path / "kept").write_text("kept")
    out.with_name(f".{out.name}.tmp").symlink_to(tmp_path / "kept")
    assert main([str(run), "--out", str(out)]) == 0
    assert (tmp_path / "kept").read_text() == "kept"
    assert "<html" in out.read_text()


def test_no_steps_or_a_full_disk_leave_the_older_page(tmp_path, capsys):
    run, out = write_run(tmp_path / "run"), tmp_path / "report.html"
    out.write_text("older")
    assert main([str(tmp_path), "--out", str(out)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, before[1]))
    code = main([str(run), "--out", str(out)])
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    assert "--out" in capsys.readouterr().err
    assert out.read_text() == "older"
    for wrong in ("", str(tmp_path)):
        assert main([str(run), "--out", wrong]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "run"}


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, Debian's package chromium")
def test_a_browser_draws_it_without_a_complaint(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    runs = [str(write_run(tmp_path / name)) for name in ("one", "two")]
    assert main([*runs, "--out", str(out)]) == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path}/profile", "--dump-dom", out.as_uri()]
    done = subprocess.run(
        [str(CHROMIUM), *options], check=True, capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<canvas") == 5
