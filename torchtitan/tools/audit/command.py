"""Ask a run what it did: `python -m torchtitan audit VERB RUN`.

Each verb is a module of this package with a `main(arguments)`. It is imported when it is asked for,
and returns the exit code; a user's mistake is printed here, with code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from torchtitan.base.errors import ConfigError, UserError, did_you_mean

VERBS: Mapping[str, tuple[str, str]] = {
    "verify": ("torchtitan.tools.audit.verify", "whether steps trained again give what was logged"),
    "reproduce": (
        "torchtitan.tools.audit.reproduce",
        "the commands that would train the run again",
    ),
    "explain": (
        "torchtitan.tools.audit.explain",
        "which samples and documents made the batch of a step",
    ),
}
"""The module of each verb, and what it tells."""


def main(argv: Sequence[str]) -> int:
    """Run a verb; return 0, or 2 for a mistake, which is printed."""
    verb, *arguments = argv or ["--help"]
    try:
        if verb in ("-h", "--help"):
            lines = [f"  {name:<12} {summary}" for name, (_, summary) in VERBS.items()]
            usage = "usage: python -m torchtitan audit VERB ... [--help]\n\nverbs:"
            sys.stdout.write("\n".join([usage, *lines]) + "\n")
            return 0
        if verb not in VERBS:
            raise ConfigError(
                f"the verb must be one of {', '.join(VERBS)}, got {verb!r:.60}"
                f"{did_you_mean(verb, VERBS)}"
            )
        code: int = import_module(VERBS[verb][0]).main(arguments)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return code
