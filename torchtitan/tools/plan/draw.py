"""Drawings: timelines of pipelines as text, SVG or PNG, and memory over time as stacked areas.

Time runs to the right, a row is a rank, a box is one stage's work on the microbatch with its
number, and blanks are the bubble. Matplotlib is imported only for pictures. Its figures are made
without pyplot, so no display and no global state are needed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.base.errors import ConfigError
from torchtitan.parallel.pipeline.schedules import KINDS, Action, Kind
from torchtitan.tools.plan.schedule import Span, Timeline

SUFFIXES = (".svg", ".png")
LABELS: Mapping[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, inputs",
    "backward_weight": "backward, weights",
}
# a rank's first stage in the first colour, its later ones in the second
_COLOURS: Mapping[Kind, tuple[str, str]] = {
    "forward": ("#4878cf", "#a9c1ec"),
    "backward": ("#d65f5f", "#efb3b3"),
    "backward_input": ("#e8a33d", "#f6d59f"),
    "backward_weight": ("#6aa84f", "#b9d9ac"),
}
# purposes of memory, from bottom to top
_AREAS: Mapping[str, str] = {
    "weights": "#4878cf",
    "optimizer": "#8da9d8",
    "gradients": "#d65f5f",
    "gathered weights": "#9467bd",
    "activations": "#6aa84f",
    "logits": "#e8a33d",
    "communication": "#8c8c8c",
    "temporaries": "#c7b299",
}
LEGEND = (
    "F forward, B backward, I and W its halves for inputs and weights, then the microbatch;\n"
    "small letters: a later stage of the rank; dots: idle"
)


def as_text(timeline: Timeline, *, num_slots: int, width: int) -> str:
    """Draw the timeline in `num_slots` slots, broken into lines of `width` characters."""
    widest = max(span.action.microbatch for row in timeline.rows for span in row)
    per_slot = 2 + len(str(widest))
    per_time = num_slots * per_slot / timeline.makespan
    lines = [_row_text(row, per_time=per_time) for row in timeline.rows]
    length = max(per_slot, width - len("rank 00 ")) // per_slot * per_slot
    total = max(len(line) for line in lines)
    blocks = [
        "\n".join(
            f"rank {rank:<2} {line.ljust(total, '.')[start : start + length]}"
            for rank, line in enumerate(lines)
        )
        for start in range(0, total, length)
    ]
    return "\n\n".join(blocks)


def _row_text(row: Sequence[Span], *, per_time: float) -> str:
    text = ""
    first_stage = min(span.action.stage for span in row)
    for span in row:
        begin, end = round(span.start * per_time), round(span.end * per_time)
        text = text.ljust(begin, ".")
        text += _label(span.action, first_stage).ljust(end - begin - 1, "-")[: end - len(text) - 1]
        text = text.ljust(end)
    return text


def _label(action: Action, first_stage: int) -> str:
    letter = next(letter for letter, action_name in KINDS.items() if action_name == action.kind)
    return f"{letter if action.stage == first_stage else letter.lower()}{action.microbatch}"


def save_timeline(path: Path, timeline: Timeline, *, title: str, unit: str, num_slots: int) -> None:
    """Draw a timeline. `unit` is that of its time; raise ConfigError if the suffix is not .svg or
    .png, or matplotlib is missing."""
    check_picture(path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_ranks = len(timeline.rows)
    size = (min(24.0, max(7.0, 0.2 * num_slots)), 0.32 * num_ranks + 1.15)
    figure = Figure(figsize=size, layout="constrained")
    _draw(figure.subplots(), title=title, unit=unit, timeline=timeline)
    kinds = {span.action.kind for row in timeline.rows for span in row}
    entries = [
        Patch(color=_COLOURS[action_name][0], label=LABELS[action_name])
        for action_name in LABELS
        if action_name in kinds
    ]
    if any(timeline.num_stages_of(rank) > 1 for rank in range(num_ranks)):
        entries.append(Patch(color="#cccccc", label="lighter: a later stage of the rank"))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), fontsize=8)
    _save(figure, path)


def save_areas(
    path: Path, *, panels: Sequence[tuple[str, Mapping[str, Sequence[float]]]], limit: float
) -> None:
    """Draw panels of stacked areas, in GiB over the step, with a line at the limit; raise
    ConfigError as `save_timeline` does."""
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 2.6 * len(panels) + 0.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for axis, (title, areas) in zip(axes, panels, strict=True):
        num = len(next(iter(areas.values())))
        drawn = axis.stackplot(
            [100 * i / num for i in range(num)],
            *areas.values(),
            colors=[_AREAS[area] for area in areas],
            step="post",
        )
        handles |= dict(zip(areas, drawn, strict=True))
        axis.axhline(limit, color="#b00020", linewidth=1.0, linestyle="--")
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlim(0, 100)
        axis.set_ylabel("GiB", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[-1].set_xlabel(
        "% of the events of a step; dashed: the device's memory minus the allowance", fontsize=8
    )
    figure.legend(
        handles=handles.values(), labels=handles.keys(), loc="outside right upper", fontsize=8
    )
    _save(figure, path)


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn to `path`; raise ConfigError if the suffix is not .svg or
    .png, or matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out must end in {' or '.join(SUFFIXES)}, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--out {path} needs matplotlib; pip install matplotlib, or remove --out")


def _save(figure: Any, path: Path) -> None:
    import matplotlib

    # text stays text, and the bytes do not depend on the date, so that pictures can be in git
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "torchtitan"}):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata=metadata, dpi=130)


def _draw(axis: Any, *, title: str, unit: str, timeline: Timeline) -> None:
    makespan = timeline.makespan
    for rank, row in enumerate(timeline.rows):
        first_stage = min(span.action.stage for span in row)
        for action_name, colours in _COLOURS.items():
            for later, colour in enumerate(colours):
                boxes = [
                    (span.start, span.end - span.start)
                    for span in row
                    if span.action.kind == action_name
                    and (span.action.stage != first_stage) == later
                ]
                if boxes:
                    axis.broken_barh(
                        boxes, (rank - 0.45, 0.9), color=colour, edgecolor="white", linewidth=0.6
                    )
        for span in row:
            # a number wider than its box would overlap its neighbours
            if span.end - span.start >= makespan / 150:
                middle = (span.start + span.end) / 2
                number = str(span.action.microbatch)
                axis.text(middle, rank, number, ha="center", va="center", fontsize=7)
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlim(0, makespan)
    axis.set_ylim(len(timeline.rows) - 0.5, -0.5)
    axis.set_yticks(range(len(timeline.rows)), [f"rank {r}" for r in range(len(timeline.rows))])
    axis.set_xlabel(unit, fontsize=8)
    axis.tick_params(labelsize=8)
