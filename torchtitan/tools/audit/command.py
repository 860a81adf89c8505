"""Questions to a run: `python -m torchtitan audit VERB RUN`.

    python -m torchtitan audit explain RUN --step 100 --text
    python -m torchtitan audit explain RUN --document data/a.jsonl:17
    python -m torchtitan audit verify RUN --steps 5
    python -m torchtitan audit reproduce RUN --out again

This module has the options of all verbs, so that `--help` does not import torch. Modules that the
run's settings name are imported only with `--trust_code`.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import ConfigError
from torchtitan.base.urls import local_path
from torchtitan.tools.verbs import Verbs, build_parser, choose, report_errors

VERBS: Verbs = {
    "explain": (
        "torchtitan.tools.audit.explain",
        "name the samples and documents of a step, or the steps of a document",
    ),
    "verify": ("torchtitan.tools.audit.verify", "train steps again and compare with the log"),
    "reproduce": ("torchtitan.tools.audit.reproduce", "write commands that train the run again"),
}


@report_errors
def main(argv: Sequence[str]) -> int:
    """Run a verb; return 0, 1 if `verify` finds a difference, or 2 for a mistake."""
    verb = choose(VERBS, argv, prog="python -m torchtitan audit", noun="verb", what="the verb")
    if verb is None:
        return 0
    options = PARSERS[verb](argv[1:])
    with trusting_stored(options.trust_code):
        code: int = import_module(VERBS[verb][0]).main(options)
    return code


def parse_explain(argv: Sequence[str]) -> argparse.Namespace:
    """Name the samples and documents of a step, or the steps of a document.

    No log is needed: the position of a step gives the numbers of its samples, the permutation gives
    their places in the data, and both can be inverted. With --replay, the step is trained again
    from the checkpoint before it and looked into: outputs of layers, gradients, and the loss of
    every token. Settings of the trainer after --replay select another layout.
    """
    parser = _parser("explain", parse_explain)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="explain the batch of this step")
    text = "find the steps of a document; FILE finds all of its documents"
    what.add_argument("--document", metavar="FILE[:ROW]", help=text)
    text = "ranks after the last checkpoint, or of --replay; default: those of the last start"
    add("--world_size", type=int, metavar="N", help=text)
    add("--text", action="store_true", help="print the text of each document")
    add("--replay", action="store_true", help="train the step again and look into it")
    add("--out", type=local_path, metavar="DIR", help="keep the files of --replay here")
    add("--json", action="store_true", help="print one JSON object")
    options, settings = parser.parse_known_args(argv)
    options.settings = settings
    if (options.settings or options.out) and not options.replay:
        given = " ".join(options.settings) or "--out"
        raise ConfigError(f"settings of another layout require --replay, got {given}")
    if options.document is not None and (options.text or options.replay):
        name = "--text" if options.text else "--replay"
        raise ConfigError(f"{name} requires --step, got --document")
    return options


def parse_verify(argv: Sequence[str]) -> argparse.Namespace:
    """Check whether steps that are trained again give the logged figures.

    First every file of every checkpoint is compared with its checksum, and each manifest with its
    hash in the ledger. Then steps drawn at random are trained again from the checkpoint before
    each, and all figures that were logged on the way are compared, bit for bit.

    Exit code 0: equal. 1: different. 2: a mistake.
    """
    parser = _parser("verify", parse_verify)
    add = parser.add_argument
    add("--steps", type=int, default=3, metavar="K", help="number of steps to draw (3)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the draw (0)")
    text = "relative difference that counts as equal, for other hardware (0)"
    add("--tolerance", type=float, default=0.0, metavar="X", help=text)
    options = parser.parse_args(argv)
    if options.steps < 0:
        raise ConfigError(f"--steps must be at least 0, got {options.steps}")
    return options


def parse_reproduce(argv: Sequence[str]) -> argparse.Namespace:
    """Write a script that trains a run again, with all changes of settings and layout.

    The ledger has the settings and layout of each start. Each command trains the steps between two
    changes, from the checkpoint of the previous command. Steps that were lost and trained again are
    not repeated, and restarts without changes are left out.
    """
    parser = _parser("reproduce", parse_reproduce)
    text = "a new folder for the script and its settings"
    parser.add_argument("--out", type=local_path, required=True, metavar="DIR", help=text)
    options = parser.parse_args(argv)
    if options.out.exists():
        raise ConfigError(f"--out must be a new folder, got {options.out}")
    return options


def _parser(verb: str, parse: Callable[..., object]) -> argparse.ArgumentParser:
    parser = build_parser(f"audit {verb}", inspect.getdoc(parse))
    parser.allow_abbrev = False
    parser.add_argument("run", type=Path, metavar="RUN", help="job.dump_folder of the run")
    add_trust_code(parser)
    return parser


PARSERS = {"explain": parse_explain, "verify": parse_verify, "reproduce": parse_reproduce}
