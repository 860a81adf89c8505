"""What this library costs beside its peers, measured side by side on this machine.

    python scripts/benchmark.py train --pairs 5 --out figures.json --plot figures.png
    python scripts/benchmark.py checkpoint --size_gib 1

Each command runs the library and its peers in turn, A B A B, checks that both computed the same,
and prints the ratio of their times with its spread; --out writes every single time as JSON.

Exit codes: 0 measured; 1 the two did not compute the same, so there is no ratio; 2 a mistake in the
options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from scripts.benchmarks import (
    attention,
    checkpoint,
    counts,
    data,
    files,
    gpu,
    loss,
    pairs,
    pipeline,
    prepare,
    recompute,
    startup,
    train,
    upload,
)
from torchtitan.base.errors import UserError
from torchtitan.base.urls import local_path

COMMANDS = {
    "train": train,
    "recompute": recompute,
    "loss": loss,
    "data": data,
    "prepare": prepare,
    "startup": startup,
    "attention": attention,
    "pipeline": pipeline,
    "checkpoint": checkpoint,
    "upload": upload,
    "counts": counts,
    "files": files,
    "gpu": gpu,
}


def main(argv: Sequence[str]) -> int:
    """Measure, print a table, and write the figures where --out and --plot say."""
    args = _parser().parse_args(argv)
    try:
        report = COMMANDS[args.command].measure(args)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    pairs.show(report)
    if args.out is not None:
        pairs.write_json(report, args.out)
    if args.plot is not None:
        pairs.draw(report, args.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="WHAT", dest="command")
    for name, module in COMMANDS.items():
        summary, _, details = (module.__doc__ or "").partition("\n\n")
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=summary,
            epilog=details,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_options(command)
        command.add_argument("--pairs", type=_count, default=5, metavar="N", help="A B repeated")
        command.add_argument(
            "--out", type=local_path, metavar="FILE", help="write the figures as JSON"
        )
        command.add_argument(
            "--plot", type=local_path, metavar="FILE", help="draw the ratios of all pairs"
        )
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
