"""What commands share: choosing one of several verbs, and a parser with a docstring as its help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from torchtitan.base.errors import ConfigError, did_you_mean

Verbs = Mapping[str, tuple[str, str]]
"""The module of each verb, and what it does. The module has a `main(arguments)`."""


def choose(verbs: Verbs, argv: Sequence[str], *, prog: str, noun: str, what: str) -> str | None:
    """Return the verb that `argv` starts with, or print all of them and return None for --help.

    Raises:
        ConfigError: There is no such verb. `what` names it in the message.
    """
    verb = argv[0] if argv else "--help"
    if verb in ("-h", "--help"):
        lines = [f"  {name:<10} {summary}" for name, (_, summary) in verbs.items()]
        sys.stdout.write(
            "\n".join([f"usage: {prog} {noun.upper()} ... [--help]", "", f"{noun}s:", *lines, ""])
        )
        return None
    if verb not in verbs:
        raise ConfigError(
            f"{what} must be one of {', '.join(verbs)}, got {verb!r:.60}{did_you_mean(verb, verbs)}"
        )
    return verb


def build_parser(verb: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help has the first line of a docstring above and the rest below."""
    summary, _, details = (doc or "").partition("\n\n")
    return argparse.ArgumentParser(
        prog=f"python -m torchtitan {verb}",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
