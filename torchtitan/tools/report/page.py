"""The page: what was read, put into the template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from torchtitan.base.errors import UserError
from torchtitan.mesh.dims import resolve_dims
from torchtitan.metrics.rows import figure_of
from torchtitan.tools.report.pictures import draw_layout, draw_pipeline
from torchtitan.tools.report.read import PANELS, RunRecord, curve, events

HERE = Path(__file__).parent


def build_page(runs: Sequence[RunRecord]) -> str:
    """Return the whole page about the runs.

    Text that comes from a run is escaped: a name or a setting may hold anything.
    """
    panels = []
    for title, figures in PANELS.values():
        curves = [
            {"run": number, "figure": figure, "steps": steps, "values": values}
            for number, run in enumerate(runs)
            for figure in figures
            for steps, values in [curve(run.rows, figure)]
            if steps
        ]
        if curves:
            panels.append({"title": title, "curves": curves})
    data = {
        "runs": [run.name for run in runs],
        "panels": panels,
        "events": [events(run) for run in runs],
    }
    # inside a script element no text may end it
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(", ".join(run.name for run in runs)),
        style=(HERE / "uplot.min.css").read_text(encoding="utf-8"),
        library=(HERE / "uplot.min.js").read_text(encoding="utf-8"),
        data=text,
        runs="".join(_about(number, run) for number, run in enumerate(runs)),
    )


def _about(number: int, run: RunRecord) -> str:
    """Return the section about one run: its figures in short, its layout, what was done to it."""
    last = run.rows[-1]
    tokens = figure_of(last, "num_tokens") or 0
    facts: dict[str, object] = {"steps": last["step"], "tokens": f"{tokens:,.0f}"}
    for key in ("loss", "validation_loss"):
        values = [value for row in run.rows if (value := figure_of(row, key)) is not None]
        if values:
            facts[f"last {key.replace('_', ' ')}"] = f"{values[-1]:.5g}"
    layout = pipeline = ""
    if run.hardware is not None:
        facts["ranks"] = run.hardware.world_size
        facts["device"] = run.hardware.device
    if run.job is not None and run.hardware is not None:
        config = run.job.config
        facts["model"] = f"{config.model.name} {config.model.flavor}"
        try:
            dims = resolve_dims(config.parallelism, world_size=run.hardware.world_size)
        except UserError:  # an elastic start had another layout
            pass
        else:
            facts["layout"] = dims
            layout = draw_layout(dims)
    saved = [row for row in run.ledger if row["event"] == "checkpoint"]
    if saved:
        facts["checkpoints"] = f"{len(saved)}, last {saved[-1]['folder']}"
    ends = [row for row in run.ledger if row["event"] == "end"]
    if ends and ends[-1] is run.ledger[-1]:
        facts["ended"] = ends[-1]["reason"]
    pipeline = "".join(
        f"<h3>{escape(title)}</h3><div class='wide'>{picture}</div>"
        for title, picture in draw_pipeline(run)
    )
    items = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>"
        for key, value in facts.items()
    )
    rows = "".join(
        f"<tr class='{escape(str(one['kind']))}'><td>{one['step']}</td>"
        f"<td>{escape(str(one['time']).replace('T', ' ').replace('+00:00', ''))}</td>"
        f"<td>{escape(str(one['line']))}</td></tr>"
        for one in events(run)
    )
    table = (
        f"<h3>What was done</h3><div class='wide'><table><thead><tr><th>step</th><th>UTC</th>"
        f"<th></th></tr></thead><tbody>{rows}</tbody></table></div>"
        if rows
        else ""
    )
    picture = f"<h3>Layout</h3><div class='wide'>{layout}</div>" if layout else ""
    return (
        f"<section class='card run r{number % 8}'><h2>{escape(run.name)}</h2><dl>{items}</dl>"
        f"{picture}{pipeline}{table}</section>"
    )
