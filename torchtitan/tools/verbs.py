"""Shared parts of the commands: parsers, tables, and the report of an error.

A verb is a module with a `main(arguments)` that returns the exit code. It imports torch only after
its command line is parsed, so that `--help` and a wrong option take no seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from torchtitan.base.custom import add_trust_code
from torchtitan.base.errors import ConfigError, UserError

Main = Callable[[Sequence[str]], int]
DTYPES = ("float32", "bfloat16", "float16")
"""`generate.generator.DTYPES`, which cannot be imported without torch."""


class Parser(argparse.ArgumentParser):
    """A parser whose error is a ConfigError."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message}; --help lists the options")


def build_parser(verb: str, doc: str | None) -> Parser:
    """Return a parser whose help has the first line of a docstring above and the rest below."""
    summary, _, details = (doc or "").partition("\n\n")
    return Parser(
        prog=f"torchtitan {verb}",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option: an integer from `least` on."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of aligned columns: the first to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{first:<{widths[0]}}"
        + "".join(f"  {cell:>{n}}" for cell, n in zip(cells, widths[1:], strict=True))
        for first, *cells in rows
    ]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verb that opens a model with `api.load_generator`."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="of a run or Hugging Face")
    add("--tokenizer", metavar="PATH", help="instead of the checkpoint's")
    add("--chat_template", metavar="FILE", help="instead of the tokenizer's or the run's")
    add("--dtype", choices=DTYPES, help="of the computation; default: as the weights")
    add("--skip_verify", action="store_true", help="do not verify checksums")
    add_trust_code(parser)


def load_args(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_model_options` as arguments of `api.load_generator`."""
    options = {key: getattr(args, key) for key in ("tokenizer", "chat_template", "dtype")}
    return {**options, "verify": not args.skip_verify, "trust_code": args.trust_code}


def report_errors(main: Main) -> Main:
    """Make `main` print a UserError or OSError and return 2 (or the error's exit code), and return
    130 at Ctrl-C.

    If all ranks of a job have the same error, only rank 0 prints it.
    """

    @wraps(main)
    def run(argv: Sequence[str]) -> int:
        try:
            return main(argv)
        except BrokenPipeError:  # the reader of the output has enough
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - flushed at exit
            return 0
        except (UserError, OSError) as error:
            if os.environ.get("RANK", "0") != "0":
                from torchtitan.mesh.ranks import let_rank_0_report

                let_rank_0_report()
            sys.stderr.write(f"error: {error}\n")
            return error.exit_code if isinstance(error, UserError) else UserError.exit_code
        except KeyboardInterrupt:
            sys.stderr.write("\nstopped\n")
            return 130

    return run
