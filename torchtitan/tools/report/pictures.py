"""The layout of a run and its pipeline's timeline, as SVG."""

from __future__ import annotations

from html import escape

from torchtitan.mesh.dims import ParallelDims
from torchtitan.parallel.pipeline.layout import PipelineLayout
from torchtitan.tools.plan.schedule import Costs, simulate

CELL, GAP, LEFT, TOP = 34, 4, 92, 26
MOST_RANKS = 512
"""More would be unreadable."""
WIDTH, ROW = 940, 22


def draw_layout(dims: ParallelDims) -> str:
    """Draw the ranks: a row per pipeline rank, with a box per data-parallel rank, which contains
    the ranks that share its samples."""
    if dims.world_size > MOST_RANKS:
        return ""
    inner = dims.cp * dims.tp
    box = inner * CELL + GAP
    parts = []
    for column in range(dims.dp):
        replica, shard = divmod(column, dims.dp_shard)
        name = f"dp {shard}" if dims.dp_replicate == 1 else f"copy {replica}, dp {shard}"
        parts.append(_text(LEFT + column * (box + GAP) + 2, TOP - 9, name))
    for row in range(dims.pp):
        y = TOP + row * (CELL + 2 * GAP)
        parts.append(_text(0, y + 21, f"pipeline {row}" if dims.pp > 1 else "ranks"))
        for column in range(dims.dp):
            x = LEFT + column * (box + GAP)
            parts.append(_rect(x, y, box - GAP + 4, CELL + 2, css_class="group"))
            for rank_in_row in range(inner):
                rank = (row * dims.dp + column) * inner + rank_in_row
                cp, tp = divmod(rank_in_row, dims.tp)
                label = f"rank {rank}: pp {row}, dp {column}, cp {cp}, tp {tp}"
                at = x + 2 + rank_in_row * CELL
                parts.append(
                    _rect(at, y + 2, CELL - 4, CELL - 2, css_class=f"cell c{cp % 2}", say=label)
                )
                parts.append(_text(at + CELL / 2 - 2, y + 21, str(rank), css_class="rank"))
    width = LEFT + dims.dp * (box + GAP) + GAP
    return _svg(width, TOP + dims.pp * (CELL + 2 * GAP) + 4, parts)


def draw_pipeline(pipeline: PipelineLayout) -> str:
    """Draw the planned actions of each pipeline rank in a step; a backward takes two forwards."""
    timeline = simulate(pipeline.table, costs=Costs())
    scale = (WIDTH - 60) / timeline.makespan
    parts = []
    for rank, row in enumerate(timeline.rows):
        y = rank * (ROW + GAP)
        parts.append(_text(0, y + 15, f"rank {rank}"))
        first_stage = min(span.action.stage for span in row)
        for span in row:
            action = span.action
            later = " later" if action.stage != first_stage else ""
            width = max(1.0, (span.end - span.start) * scale - 1)
            label = (
                f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}: "
                f"{span.start:.4g} to {span.end:.4g}"
            )
            x = 56 + span.start * scale
            parts.append(_rect(x, y, width, ROW, css_class=f"span {action.kind}{later}", say=label))
            if width > 14:
                parts.append(
                    _text(x + width / 2, y + 15, str(action.microbatch), css_class="microbatch")
                )
    return _svg(WIDTH, len(timeline.rows) * (ROW + GAP), parts)


def _svg(width: float, height: float, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'role="img">{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, *, css_class: str, say: str = "") -> str:
    title = f"<title>{escape(say)}</title>" if say else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
        f'class="{css_class}">{title}</rect>'
    )


def _text(x: float, y: float, text: str, *, css_class: str = "label") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css_class}">{escape(text)}</text>'
