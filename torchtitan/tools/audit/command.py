"""Ask a run what it did: `python -m torchtitan audit VERB RUN`.

Each verb is a module of this package with a `main(arguments)`. It is imported when it is asked for,
and returns the exit code; a user's mistake is printed here, with code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from torchtitan.base.errors import UserError
from torchtitan.tools.verbs import Verbs, choose

VERBS: Verbs = {
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


def main(argv: Sequence[str]) -> int:
    """Run a verb; return 0, or 2 for a mistake, which is printed."""
    try:
        verb = choose(VERBS, argv, prog="python -m torchtitan audit", noun="verb", what="the verb")
        if verb is None:
            return 0
        code: int = import_module(VERBS[verb][0]).main(argv[1:])
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return code
