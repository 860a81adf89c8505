"""What parts of the library cost, measured side by side with the plain way, on this machine.

    python scripts/benchmark.py checkpoint --size_gib 1 --out figures.json
    python scripts/benchmark.py loss --seq_len 8192 --vocab_size 128256 --width 512

Both ways take turns, A B A B, so that a busy neighbour meets both; a ratio is that of a pair. The
first pair is not counted. `scripts/benchmarks/` has a file for each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from scripts.benchmarks import checkpoint, loss

BENCHMARKS = {
    "checkpoint": (checkpoint, "save, load, and time the loop is blocked"),
    "loss": (loss, "the head's loss and gradients: time and memory"),
}


def main(argv: Sequence[str]) -> int:
    """Measure, print a table, and write the figures where --out says."""
    args = _parser().parse_args(argv)
    return int(args.run(args))


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    for name, (benchmark, summary) in BENCHMARKS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=benchmark.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        benchmark.add_arguments(command)
        command.add_argument("--pairs", type=int, default=5, metavar="N", help="A B repeated")
        command.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
        command.set_defaults(run=benchmark.run)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
