"""Fill the template of the page."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

from torchtitan.base.errors import printable
from torchtitan.base.log import plural
from torchtitan.metrics.events import newest_hardware
from torchtitan.metrics.rows import figure_of
from torchtitan.tools.report.read import PANELS, RunRecord, events

HERE = Path(__file__).parent
MOST_CHARACTERS = 80
"""Shown of the names of data files."""


def escape(text: object) -> str:
    """Return text of a run for HTML, without control characters."""
    return html.escape(printable(str(text)))


def build_page(runs: Sequence[RunRecord]) -> str:
    """Return the page about the runs.

    Text of a run is escaped, since names and settings may contain anything.
    """
    data = {
        "runs": [run.name for run in runs],
        "panels": [*_panels(runs)],
        "events": [events(run) for run in runs],
    }
    # no text may end the script element
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(", ".join(run.name for run in runs)),
        style=(HERE / "uplot.min.css").read_text(encoding="utf-8"),
        library=(HERE / "uplot.min.js").read_text(encoding="utf-8"),
        data=text,
        runs="".join(_section(number, run) for number, run in enumerate(runs)),
    )


def _panels(runs: Sequence[RunRecord]) -> Iterator[dict[str, object]]:
    """Yield the charts of all figures that a row has. One without finite values has no curve."""
    for title, label, figures in PANELS:
        if not any(name in run.figures.values for run in runs for name in figures):
            continue
        curves = [
            {"run": number, "figure": figure, "steps": steps, "values": values}
            for number, run in enumerate(runs)
            for figure in figures
            for steps, values in [run.figures.curve(figure)]
            if steps
        ]
        yield {"title": title, "label": label, "curves": curves}


def _section(number: int, run: RunRecord) -> str:
    """Return the section of a run: facts and events."""
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(run)
    )
    rows = "".join(
        f"<tr class='{escape(event['kind'])}'><td>{event['step']}</td>"
        f"<td>{escape(str(event['time']).replace('T', ' ').replace('+00:00', ''))}</td>"
        f"<td>{escape(event['line'])}</td></tr>"
        for event in events(run)
    )
    if rows:
        rows = (
            f"<h3>Events</h3><div class='wide'><table><thead><tr><th>step</th><th>UTC</th>"
            f"<th></th></tr></thead><tbody>{rows}</tbody></table></div>"
        )
    title = f"<h2>{escape(run.name)}</h2>"
    return f"<section class='card run r{number % 8}'>{title}<dl>{facts}</dl>{rows}</section>"


def _facts(run: RunRecord) -> Iterator[tuple[str, object]]:
    last = run.figures.last
    yield "steps", last["step"]
    yield "tokens", f"{figure_of(last, 'num_tokens') or 0:,.0f}"
    for key in ("loss", "validation_loss"):
        if (value := run.figures.newest(key)) is not None:
            yield f"last {key.replace('_', ' ')}", f"{value:.5g}"
    if (config := run.config) is not None:
        yield "model", f"{config.model.name} {config.model.flavor}"
        files = ", ".join(config.training.dataset_path)[:MOST_CHARACTERS]
        yield "data", f"{config.training.dataset}: {files}" if files else config.training.dataset
        yield "sequence length", config.training.seq_len
        yield "optimizer", f"{config.optimizer.name}, peak lr {config.optimizer.lr:g}"
    newest = {row["event"]: row for row in run.events}
    if start := newest.get("start"):
        yield "layout", f"{start['layout']}, {plural(start['world_size'], 'rank')}"
    if hardware := newest_hardware(run.events):
        yield "device", hardware.device
    if saved := newest.get("checkpoint"):
        yield "last checkpoint", saved["folder"]
    if run.events and (end := run.events[-1])["event"] in ("end", "failure"):
        # of an error the reason is "TYPE: MESSAGE"; the events have all of it
        error = end["reason"].partition(": ")[0]
        yield "ended", f"by an error, {error}" if end["event"] == "failure" else end["reason"]
