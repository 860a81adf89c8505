"""Compare trainings: two runs that are there, or layouts of one job, trained here.

    python -m torchtitan compare layouts my.toml single fsdp2 tp2
    python -m torchtitan compare runs outputs/a outputs/b
    python -m torchtitan compare --bisect my.toml single fsdp2,tp2

Each is a module of this package with a `main(arguments)`, as the verbs are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torchtitan.base.errors import ConfigError, did_you_mean

KINDS: Mapping[str, tuple[str, str]] = {
    "layouts": (
        "torchtitan.tools.compare.compare_layouts",
        "train one job in several layouts, and say where they part",
    ),
    "runs": ("torchtitan.tools.compare.compare_runs", "two runs: all figures and all checkpoints"),
    "--bisect": (
        "torchtitan.tools.audit.bisect",
        "name the first module in which two layouts of a job differ",
    ),
}
"""The module of each kind of comparison, and what it does."""


def main(argv: Sequence[str]) -> int:
    """Run one kind of comparison; return 0, 1 where something differs that should not, or 2."""
    kind, *arguments = argv or ["--help"]
    if kind in ("-h", "--help"):
        lines = [f"  {name:<10} {summary}" for name, (_, summary) in KINDS.items()]
        head = "usage: python -m torchtitan compare KIND ... [--help]\n\nkinds:"
        sys.stdout.write("\n".join([head, *lines]) + "\n")
        return 0
    if kind not in KINDS:
        raise ConfigError(
            f"what to compare must be one of {', '.join(KINDS)}, got {kind!r:.60}"
            f"{did_you_mean(kind, KINDS)}"
        )
    module: Any = import_module(KINDS[kind][0])
    if kind != "runs":  # which starts nothing
        import_module("torchtitan.tools.compare.compare_layouts").end_ranks_on_signals()
    code: int = module.main(arguments)
    return code
