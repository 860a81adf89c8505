"""Fill the template of the page."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

from torchtitan.base.errors import UserError, printable
from torchtitan.job import Config
from torchtitan.mesh.dims import ParallelDims, resolve_dims
from torchtitan.metrics.rows import figure_of
from torchtitan.models.settings import given_sizes
from torchtitan.parallel.layout import Layout
from torchtitan.tools.report.pictures import draw_layout, draw_pipeline
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
    """Return the section of a run: facts, layout, pipeline and events."""
    parts = [f"<section class='card run r{number % 8}'><h2>{escape(run.name)}</h2><dl>"]
    parts += (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(run)
    )
    parts.append("</dl>")
    pictures = {}
    if (dims := _dims(run)) is not None and (picture := draw_layout(dims)):
        pictures["Layout"] = picture
    if run.layout is not None and run.layout.pipeline is not None and run.job is not None:
        settings = run.job.config.parallelism
        title = f"{settings.pipeline_parallel_schedule}, planned: a backward takes two forwards"
        pictures[title] = draw_pipeline(run.layout.pipeline)
    parts += (
        f"<h3>{escape(title)}</h3><div class='wide'>{picture}</div>"
        for title, picture in pictures.items()
    )
    rows = "".join(
        f"<tr class='{escape(event['kind'])}'><td>{event['step']}</td>"
        f"<td>{escape(str(event['time']).replace('T', ' ').replace('+00:00', ''))}</td>"
        f"<td>{escape(event['line'])}</td></tr>"
        for event in events(run)
    )
    if rows:
        parts.append(
            f"<h3>Events</h3><div class='wide'><table><thead><tr><th>step</th><th>UTC</th>"
            f"<th></th></tr></thead><tbody>{rows}</tbody></table></div>"
        )
    return "".join([*parts, "</section>"])


def _facts(run: RunRecord) -> Iterator[tuple[str, object]]:
    last = run.figures.last
    yield "steps", last["step"]
    yield "tokens", f"{figure_of(last, 'num_tokens') or 0:,.0f}"
    for key in ("loss", "validation_loss"):
        if (value := run.figures.newest(key)) is not None:
            yield f"last {key.replace('_', ' ')}", f"{value:.5g}"
    if run.job is not None:
        config = run.job.config
        yield "model", _model(config, run.layout)
        if run.layout is not None:
            yield "parameters", f"{run.layout.counts.num_parameters:,}"
        files = ", ".join(config.training.dataset_path)[:MOST_CHARACTERS]
        yield "data", f"{config.training.dataset}: {files}" if files else config.training.dataset
        yield "sequence length", config.training.seq_len
        yield "optimizer", f"{config.optimizer.name}, peak lr {config.optimizer.lr:g}"
    if run.hardware is not None:
        yield "ranks", run.hardware.world_size
        yield "device", run.hardware.device
    if (dims := _dims(run)) is not None:
        yield "layout", dims
    saved = [row for row in run.events if row["event"] == "checkpoint"]
    if saved:
        yield "checkpoints", f"{len(saved)}, last {saved[-1]['folder']}"
    if run.events and run.events[-1]["event"] in ("end", "failure"):
        last = run.events[-1]
        # of an error the reason is "TYPE: MESSAGE"; the events have all of it
        error = last["reason"].partition(": ")[0]
        yield "ended", f"by an error, {error}" if last["event"] == "failure" else last["reason"]


def _model(config: Config, layout: Layout | None) -> str:
    """Return family and flavor; without the flavor if the settings give every size."""
    model = config.model
    if layout is not None:
        sizes = layout.spec.sizes
        if not sizes.missing(given_sizes(model, of=sizes)):
            return model.name
    return f"{model.name} {model.flavor}"


def _dims(run: RunRecord) -> ParallelDims | None:
    """Return the degrees of the newest start, if they are known."""
    if run.job is None or run.hardware is None:
        return None
    try:
        return resolve_dims(run.job.config.parallelism, world_size=run.hardware.world_size)
    except UserError:  # the newest start had other degrees
        return None
