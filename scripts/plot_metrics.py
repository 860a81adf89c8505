"""Draw the figures of one or more runs side by side: loss, learning rate, gradient norm, speed.

    python scripts/plot_metrics.py outputs/a outputs/b --out metrics.png --smooth 0.9
    python scripts/plot_metrics.py outputs/moe --out experts.png --experts

The suffix of --out says the format: png, svg, pdf or jpg. A run is its folder (or its
metrics.jsonl). Validation losses are dashed. --smooth W draws the running average in which each
step weighs W times what the next one does, as TensorBoard's does, over the figures themselves,
which turn pale; learning rates and validation losses are never smoothed. --experts draws instead
how many tokens each expert got, over the mean of its layer: of all layers in the last logged step,
or of the LAYER whose number follows in all of them; a run must have router.log_layers. TensorBoard
shows the figures too, and more; a picture is what one puts into a report, and it needs no server
and works where only a shell does.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torchtitan.base.errors import ConfigError, DataError, UserError
from torchtitan.base.log import plural
from torchtitan.base.urls import local_path
from torchtitan.metrics.rows import Row, figure_of, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf", ".jpg")
# figure of a row -> label of its axis
PANELS: Mapping[str, str] = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens / s, all devices",
}
LOAD = {"router/load_max_over_mean": "load of the busiest expert, of the mean"}
"""Drawn too where a run has experts."""
UNSMOOTHED = ("lr",)
PALE = 0.25
COUNTS = "router/counts/"
ALL = "all"


def main(argv: Sequence[str]) -> int:
    """Draw and return the exit code: 2 with one message for what the user can mend."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=local_path, default=Path("metrics.png"), help="picture to write"
    )
    parser.add_argument(
        "--smooth", type=_weight, default=0.0, metavar="W", help="0 (as it is) to below 1"
    )
    parser.add_argument(
        "--experts", nargs="?", const=ALL, metavar="LAYER", help="draw the load of experts"
    )
    options = parser.parse_args(argv)
    try:
        _check_format(options.out)
        runs = {label: _rows(run) for label, run in _labels(options.runs).items()}
        if options.experts is None:
            figure = draw(runs, smooth=options.smooth)
        else:
            figure = draw_experts(runs, layer=options.experts)
        _save(figure, out=options.out)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    counts = (f"{label} ({plural(len(rows), 'row')})" for label, rows in runs.items())
    print(f"{options.out}: {', '.join(counts)}")
    return 0


def draw(runs: Mapping[str, Sequence[Row]], *, smooth: float = 0.0) -> Figure:
    """Return a figure with one panel a quantity and one line a run, two where it was validated."""
    has_experts = any(name in row for rows in runs.values() for row in rows for name in LOAD)
    shown = {**PANELS, **LOAD} if has_experts else PANELS
    num_rows = math.ceil(len(shown) / 2)
    figure = _new_figure(height=3.5 * num_rows)
    panels = figure.subplots(num_rows, 2, sharex=True)
    for axes in panels.flat[len(shown) :]:
        axes.remove()
    for axes, (name, label) in zip(panels.flat, shown.items(), strict=False):
        weight = 0.0 if name in UNSMOOTHED else smooth
        for number, (run, rows) in enumerate(runs.items()):
            _draw_line(axes, *_points(rows, name), label=run, color=f"C{number}", smooth=weight)
            steps, losses = _points(rows, "validation_loss")
            if name == "loss" and steps:
                axes.plot(
                    steps,
                    losses,
                    "--o",
                    color=f"C{number}",
                    markersize=3,
                    label=f"{run}, validation",
                )
        _dress(axes, label=label)
    for axes in panels.flat[len(shown) - 2 : len(shown)]:
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(runs), 4))
    return figure


def draw_experts(runs: Mapping[str, Sequence[Row]], *, layer: str = ALL) -> Figure:
    """Return a figure with one map a run: layers by experts, or experts of a layer by steps.

    Raises:
        DataError: A run has no counts, or none of that layer.
    """
    figure = _new_figure(height=4 * len(runs))
    panels = figure.subplots(len(runs), squeeze=False)
    for axes, (run, rows) in zip(panels.flat, runs.items(), strict=True):
        having = [row for row in rows if any(key.startswith(COUNTS) for key in row)]
        names = _choose_layers(run, having[-1] if having else {}, layer=layer)
        if layer == ALL:
            table = [_load(having[-1], name) for name in names]
            axes.set_title(f"{run}, step {having[-1]['step']}")
            axes.set(xlabel="expert", ylabel="layer")
            axes.set_yticks(range(len(names)), names)
        else:
            by_step = [_load(row, names[0]) for row in having]
            if len({len(one) for one in by_step}) > 1:
                raise DataError(f"{run} must have the same number of experts in each row")
            table = [list(one) for one in zip(*by_step, strict=True)]
            axes.set_title(f"{run}, {names[0]}")
            axes.set(xlabel="step", ylabel="expert")
            places = range(0, len(having), -(-len(having) // 10))
            axes.set_xticks(places, [having[place]["step"] for place in places])
        width = max(map(len, table))
        padded = [[*row, *[math.nan] * (width - len(row))] for row in table]
        image = axes.imshow(padded, aspect="auto", interpolation="nearest", vmin=0)
        figure.colorbar(image, ax=axes, label="tokens / mean")
    return figure


def _choose_layers(run: str, row: Row, *, layer: str) -> list[str]:
    names = [key.removeprefix(COUNTS) for key in row if key.startswith(COUNTS)]
    chosen = [name for name in names if layer in (ALL, name, *name.split("."))]
    if not chosen:
        wanted = "layers" if layer == ALL else f"layer {layer}"
        there = f"layers {', '.join(names)}" if names else "no row with any"
        raise DataError(
            f"--experts needs counts of {wanted}, and {run} has {there}; name a layer that it has, "
            f"or train with router.log_layers = true"
        )
    return chosen


def _load(row: Row, layer: str) -> list[float]:
    counts = row[COUNTS + layer]
    if not isinstance(counts, list) or not all(type(n) is int and n >= 0 for n in counts):
        raise DataError(f"{COUNTS + layer!r} must be a list of whole numbers, got {counts!s:.60}")
    return [number * len(counts) / max(sum(counts), 1) for number in counts]


def _new_figure(*, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"drawing needs matplotlib, which cannot be imported ({error}); pip install matplotlib"
        ) from error
    return Figure(figsize=(11, height), dpi=150, layout="constrained")


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return steps and figures of the rows that have one: a step without labels has no loss."""
    found = [(row["step"], figure_of(row, name)) for row in rows]
    having = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in having], [value for _, value in having]


def _draw_line(
    axes: Axes, steps: list[int], figures: list[float], *, label: str, color: str, smooth: float
) -> None:
    # markers: a run of few rows would else be a line hard to see, or none
    marker = "o" if len(steps) < 30 else None
    style: dict[str, Any] = {"color": color, "linewidth": 1.4, "marker": marker, "markersize": 3}
    if smooth:
        axes.plot(steps, figures, **style, alpha=PALE)
        figures = smoothed(figures, weight=smooth)
    axes.plot(steps, figures, **style, label=label)


def smoothed(figures: Sequence[float], *, weight: float) -> list[float]:
    """Return the running average in which each figure weighs `weight` times what the next one does.

    Divided by the sum of the weights, so that it begins at the first figure.
    """
    averages, total, weights = [], 0.0, 0.0
    for figure in figures:
        total, weights = weight * total + figure, weight * weights + 1
        averages.append(total / weights)
    return averages


def _weight(text: str) -> float:
    weight = float(text)
    if not 0 <= weight < 1:
        raise argparse.ArgumentTypeError(f"at least 0 and below 1, got {text}; try 0.9")
    return weight


def _dress(axes: Axes, *, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True)
    axes.ticklabel_format(axis="y", scilimits=(-3, 6), useMathText=True)
    axes.ticklabel_format(axis="x", style="plain")
    if label.startswith("tokens / s"):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")


def _check_format(out: Path) -> None:
    if out.suffix.lower() not in FORMATS and not out.is_dir():
        raise ConfigError(
            f"--out must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {out}; "
            f"try {out.with_suffix('.png')}"
        )


def _save(figure: Figure, *, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format=out.suffix.lower().removeprefix(".") or "png")
    except OSError as error:
        raise ConfigError(
            f"--out must be a file that can be written, got {out} ({error.strerror}); name another"
        ) from error


def _labels(runs: Sequence[Path]) -> dict[str, Path]:
    """Name each run by the end of its path: as much of it as tells the runs apart."""
    folders = {run.parent if run.is_file() else run: run for run in runs}
    paths = [folder.resolve() for folder in folders]
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(set(paths)):
        length += 1
    names = [str(Path(*path.parts[-length:])) for path in paths]
    return dict(zip(names, folders.values(), strict=True))


def _rows(run: Path) -> list[Row]:
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.exists():
        raise DataError(
            f"each RUN must be a run's folder with a metrics.jsonl, got {run} without one; "
            f"name the job.dump_folder of a run that has logged a step"
        )
    rows = read_rows(path)
    if not rows:
        raise DataError(f"a run must have logged a step to be drawn, got no row in {path}")
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
