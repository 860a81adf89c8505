"""Measure this library and its peers side by side on this machine.

    python scripts/benchmark.py train --pairs 5 --out figures.json
    python scripts/benchmark.py checkpoint --size_gib 1

Each command runs the library and a peer in turn, A B A B, checks that both computed the same, and
prints the ratio of their times with its spread; --out writes every measured time as JSON.

Exit codes: 0 measured, 1 the results differ, so no ratio is printed, 2 an invalid option,
130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from scripts.benchmarks import (
    checkpoint,
    generate,
    gpu,
    layouts,
    loss,
    pairs,
    train,
)
from torchtitan.base.errors import UserError
from torchtitan.base.urls import local_path

COMMANDS = {
    "train": train,
    "checkpoint": checkpoint,
    "generate": generate,
    "loss": loss,
    "gpu": gpu,
    "layouts": layouts,
}


def main(argv: Sequence[str]) -> int:
    """Measure, print a table, and write the figures to --out."""
    args = build_parser().parse_args(argv)
    try:
        report = COMMANDS[args.command].measure(args)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        return 130
    pairs.show(report)
    if args.out is not None:
        pairs.write_json(report, args.out)
    return int(report.has_failed)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="WHAT", dest="command")
    for name, module in COMMANDS.items():
        summary, _, details = (module.__doc__ or "").partition("\n\n")
        command = commands.add_parser(
            name, help=summary, description=summary, epilog=details, formatter_class=raw
        )
        module.add_options(command)
        command.add_argument("--pairs", type=_count, default=5, metavar="N", help="repetitions")
        command.add_argument(
            "--out", type=local_path, metavar="FILE", help="write the figures as JSON"
        )
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
