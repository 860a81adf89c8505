"""Compare trainings: two runs that are there, or layouts of one job, trained here.

    python -m torchtitan compare layouts my.toml single fsdp2 tp2
    python -m torchtitan compare runs outputs/a outputs/b
    python -m torchtitan compare --bisect my.toml single fsdp2,tp2

Each is a module of this package with a `main(arguments)`, as the verbs are.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torchtitan.tools.verbs import Verbs, choose

KINDS: Verbs = {
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


def main(argv: Sequence[str]) -> int:
    """Run one kind of comparison; return 0, 1 where something differs that should not, or 2."""
    kind = choose(
        KINDS, argv, prog="python -m torchtitan compare", noun="kind", what="what to compare"
    )
    if kind is None:
        return 0
    module: Any = import_module(KINDS[kind][0])
    if kind != "runs":  # which starts nothing
        import_module("torchtitan.tools.compare.compare_layouts").end_ranks_on_signals()
    code: int = module.main(argv[1:])
    return code
