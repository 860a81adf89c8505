"""Measure the memory that a step takes on each rank, for one sequence length after another.

    python scripts/memory_curve.py train_configs/long_context_128k.toml --ranks 2 \\
        --seq_lens 16384 32768 65536 131072 --out curve.json --plot curve.svg

Every length is a job of its own, of one step (--steps for more), started as run_train.sh starts it;
the peak is that of its metrics. On a CPU that is what the process held at most, Python and torch
included, so a first job with a sequence of 1024 tokens tells what there is without long ones. Words
that begin with -- and are not known here are overrides of the job's settings.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torchtitan.base.urls import local_path
from torchtitan.metrics.rows import read_rows

ROOT = Path(__file__).parents[1]
SHORT = 1024


@dataclass(frozen=True)
class Point:
    """What one sequence length takes."""

    seq_len: int
    peak_gib: list[float]
    """Of each rank."""
    above_short_gib: float
    """The highest peak, less that of a short sequence."""


def main(argv: Sequence[str]) -> int:
    """Measure, print a table, and write what --out and --plot name; 1 if a job fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="TOML file of the job")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--seq_lens", type=int, nargs="+", default=[16384, 32768], metavar="S")
    parser.add_argument("--steps", type=int, default=1, help="steps of each job")
    parser.add_argument("--out", type=local_path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", type=local_path, metavar="FILE", help="draw them")
    options, overrides = parser.parse_known_args(argv)
    settings = [f"--training.steps={options.steps}", *overrides]
    try:
        short = max(measure(options.config, SHORT, ranks=options.ranks, settings=settings))
        print(f"a sequence of {SHORT}: {short:.3f} GiB a rank", flush=True)
        points = []
        for seq_len in sorted(options.seq_lens):
            peaks = measure(options.config, seq_len, ranks=options.ranks, settings=settings)
            points.append(Point(seq_len, peaks, max(peaks) - short))
            print(line(points), flush=True)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{error.stderr[-4000:]}\nthe job ended with code {error.returncode}\n")
        return 1
    if options.out is not None:
        figures = {"short_gib": short, "points": [asdict(point) for point in points]}
        options.out.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if options.plot is not None:
        draw(points, short=short, out=options.plot)
    return 0


def measure(config: Path, seq_len: int, *, ranks: int, settings: Sequence[str]) -> list[float]:
    """Train one job and return each rank's peak, in GiB.

    Raises:
        subprocess.CalledProcessError: The job failed; it has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torchtitan.launch", "--standalone", "--local_addr=127.0.0.1"),
            *("--nproc_per_node", str(ranks), "-m", "torchtitan.train"),
            f"--job.config_file={config.resolve()}",
            f"--job.dump_folder={folder}",
            f"--training.seq_len={seq_len}",
            "--metrics.save_for_all_ranks=true",
            *settings,
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        rows = [read_rows(file)[-1] for file in sorted(Path(folder).glob("metrics*.jsonl"))]
        assert len(rows) == ranks
        return [float(row["memory_peak_gib"]) for row in rows]


def growth(points: Sequence[Point]) -> list[float]:
    """Return by how much the memory above that of a short sequence grows from point to point."""
    return [after.above_short_gib / before.above_short_gib for before, after in pairwise(points)]


def line(points: Sequence[Point]) -> str:
    """Say the last point, and how it compares with the one before."""
    point = points[-1]
    peaks = ", ".join(f"{peak:.3f}" for peak in point.peak_gib)
    text = f"{point.seq_len:8} tokens: {peaks} GiB; above the short one {point.above_short_gib:.3f}"
    if len(points) > 1:
        whole = max(point.peak_gib) / max(points[-2].peak_gib)
        text += f", grown {growth(points)[-1]:.2f}x (with all of the process {whole:.2f}x)"
    return text


def draw(points: Sequence[Point], *, short: float, out: Path) -> None:
    """Draw the peaks over the lengths, and what growth in proportion would be."""
    from matplotlib.figure import Figure

    lengths = [point.seq_len for point in points]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(lengths, [max(point.peak_gib) for point in points], "o-", label="peak of a rank")
    axes.plot(lengths, [point.above_short_gib for point in points], "o-", label="less the process")
    first = points[0]
    linear = [first.above_short_gib * length / first.seq_len for length in lengths]
    axes.plot(lengths, linear, "--", color="grey", label="in proportion to S")
    axes.axhline(short, color="lightgrey", label=f"the process at S = {SHORT}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.set_xlabel("tokens of a sequence, S")
    axes.set_ylabel("GiB")
    axes.legend()
    figure.savefig(out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
