"""The options of `python -m torchtitan compare layouts`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.base.urls import local_path
from torchtitan.tools.compare.layouts.flips import MARGIN_TOLERANCE
from torchtitan.tools.compare.layouts.gaps import GRADIENTS_TOLERANCE, TOLERANCES, WEIGHTS_TOLERANCE
from torchtitan.tools.compare.layouts.words import option_key

GRADIENT_STEPS = 3
ROUTINGS = ("replayed", "free")
"""Ways in which layouts of a model with experts are compared."""
TOLERATED = {
    "loss_tolerance": (TOLERANCES["loss"], "relative"),
    "grad_norm_tolerance": (TOLERANCES["grad_norm"], "relative"),
    "gradients_tolerance": (GRADIENTS_TOLERANCE, "of each tensor's norm"),
    "weights_tolerance": (WEIGHTS_TOLERANCE, "of how far each tensor moved"),
    "margin_tolerance": (MARGIN_TOLERANCE, "of scores, between experts taken and left out"),
}
"""What each option sets, and of what it is."""


def build_parser(text: str, *, prog: str) -> argparse.ArgumentParser:
    """Build it; `text` is the docstring of the command."""
    summary, _, details = text.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog=prog,
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s TOML LAYOUT [LAYOUT ...] [options] [--section.key=value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("toml", type=Path, metavar="TOML", help="the job")
    parser.add_argument("layouts", nargs="+", metavar="LAYOUT", help="the first is the reference")
    add = parser.add_argument
    add("--steps", type=int, default=10, metavar="N", help="of each training (default 10)")
    add("--timeout", type=float, default=600, metavar="S", help="seconds a layout may take (600)")
    add("--out", type=local_path, metavar="DIR", help="keep the runs here; else they are deleted")
    add("--json", type=local_path, metavar="FILE", help="write all figures")
    add("--verbose", action="store_true", help="show every step")
    add(
        "--both_clippings",
        action="store_true",
        help="each with max_norm = inf, then with the job's",
    )
    for name, (default, meaning) in TOLERATED.items():
        add(f"--{name}", type=float, default=default, metavar="X", help=f"{meaning} ({default:g})")
    add(
        "--gradient_steps",
        type=int,
        default=GRADIENT_STEPS,
        metavar="N",
        help="first steps whose gradients are compared (default 3)",
    )
    add(
        "--float64",
        action="store_true",
        help="train in float64, for which the trainer has no setting: sums, and whatever has a "
        "kernel for it (context parallelism has none)",
    )
    add(
        "--routing",
        choices=("both", *ROUTINGS),
        default="both",
        help="of a model with experts: whether tokens go where the reference sent them, or each "
        "layout chooses, or one after the other (default)",
    )
    return parser


def check_options(options: argparse.Namespace, common: Sequence[str]) -> None:
    """Check the options, and that the others are the trainer's.

    Raises:
        ConfigError: One makes no sense.
    """
    for word in common:
        if not (word.startswith("--") and "." in option_key(word)):
            raise ConfigError(f"unknown option {word}; the trainer's are --section.key=value")
        if option_key(word) in ("training.steps", "job.dump_folder", "job.config_file"):
            raise ConfigError(f"{option_key(word)} is given as --steps, --out or TOML here")
    if options.steps < 1 or options.timeout <= 0 or options.gradient_steps < 0:
        raise ConfigError(
            f"--steps and --timeout must be positive and --gradient_steps not negative, got "
            f"{options.steps}, {options.timeout:g} and {options.gradient_steps}"
        )
    if options.out is not None and options.out.exists() and any(options.out.iterdir()):
        raise ConfigError(f"--out must be a new folder or an empty one, got {options.out}")
