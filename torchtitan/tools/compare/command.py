"""Compare trainings: two runs that exist, or layouts of one job that are trained here.

    torchtitan compare layouts my.toml single fsdp2 tp2
    torchtitan compare runs outputs/a outputs/b

This module has the options of both, so that `--help` does not import torch.
"""

from __future__ import annotations

import argparse
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.base.urls import local_path
from torchtitan.tools.compare.gaps import GRADIENTS_TOLERANCE, TOLERANCES, WEIGHTS_TOLERANCE
from torchtitan.tools.compare.words import option_key
from torchtitan.tools.verbs import Parser, at_least, build_parser, report_errors

TOLERATED = {
    "loss_tolerance": (TOLERANCES["loss"], "relative"),
    "grad_norm_tolerance": (TOLERANCES["grad_norm"], "relative"),
    "gradients_tolerance": (GRADIENTS_TOLERANCE, "relative to each tensor's norm"),
    "weights_tolerance": (WEIGHTS_TOLERANCE, "relative to each tensor's movement"),
}


def tolerance(text: str) -> float:
    """Return the value of an option: a finite number from 0 on."""
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number from 0 on, got {text}")
    return value


@report_errors
def main(argv: Sequence[str]) -> int:
    """Run a comparison; return 0 if it finds no difference, 1 if it finds one, 2 for a mistake."""
    parser = build_parser("compare", __doc__)
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    add_options: tuple[Callable[[Parser], None], ...] = (layouts, runs)
    for add_options_of in add_options:
        name, style = add_options_of.__name__, argparse.RawDescriptionHelpFormatter
        text = inspect.getdoc(add_options_of)
        kind = kinds.add_parser(name, description=text, formatter_class=style, allow_abbrev=False)
        kind.set_defaults(kind=name)
        add_options_of(kind)
    options, settings = parser.parse_known_args(argv)
    if options.kind == "runs" and settings:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    if options.kind == "layouts":
        _check_layouts(options, settings)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    code: int = import_module(f"torchtitan.tools.compare.{options.kind}").main(options)
    return code


def layouts(parser: Parser) -> None:
    """Train one job in several layouts on this machine, and compare them with the first.

    A layout is a list of axes with their number of ranks, joined by commas (fsdpN, ddpN, hsdpNxN,
    tpN, ppN, cpN; single or 1 is one device), and options of the trainer for this layout, such as
    "fsdp2 --compile.enable". epN adds no ranks: it distributes experts over the ranks of fsdp, cp
    and tp. The first layout is the reference; a single layout is compared with one device. Each
    layout is a real launch with the same global batch.

    Initial weights must be bit-identical. Losses, gradient norms before clipping, the gradient of
    every parameter in the first steps and final weights must agree within the tolerances. Options
    of the trainer outside quotes apply to all layouts.

    Rounding decides between two experts whose scores nearly tie, and trainings are different from
    then on: if layouts of a model with experts diverge, compare them with --float64.

    Exit code 0: the same training in all layouts. 1: a layout diverges or fails. 2: a mistake.
    """
    parser.usage = "%(prog)s TOML LAYOUT [LAYOUT ...] [options] [--section.key=value ...]"
    add = parser.add_argument
    add("toml", type=Path, metavar="TOML", help="the job")
    add("layouts", nargs="+", metavar="LAYOUT", help="the first is the reference")
    add("--steps", type=at_least(1), default=10, metavar="N", help="steps of each training (10)")
    add("--timeout", type=float, default=600, metavar="S", help="seconds per layout (600)")
    add("--out", type=local_path, metavar="DIR", help="keep the runs here; default: delete them")
    add("--json", type=local_path, metavar="FILE", help="write all figures")
    for name, (default, unit) in TOLERATED.items():
        add(f"--{name}", type=tolerance, default=default, metavar="X", help=f"{unit} ({default:g})")
    text = "compare the gradients of the first N steps (3)"
    add("--gradient_steps", type=at_least(0), default=3, metavar="N", help=text)
    text = "train in float64, which context parallelism has no kernels for"
    add("--float64", action="store_true", help=text)


def _check_layouts(options: argparse.Namespace, settings: Sequence[str]) -> None:
    """Add the settings of all layouts to the options; raise ConfigError if one is invalid."""
    options.settings = settings
    for word in settings:
        if not (word.startswith("--") and "." in option_key(word)):
            raise ConfigError(f"unknown option {word}; the trainer's are --section.key=value")
        if option_key(word) in ("training.steps", "job.dump_folder", "job.config_file"):
            raise ConfigError(f"set {option_key(word)} by --steps, --out or TOML")
    if options.out is not None and options.out.exists() and any(options.out.iterdir()):
        raise ConfigError(f"--out must be a new or empty folder, got {options.out}")


def runs(parser: Parser) -> None:
    """Compare two runs: every logged figure, and every tensor of the checkpoints that both have.

    Prints the first difference and a table. Equal means bit-identical, unless --tolerance allows a
    relative difference. With a tolerance, figures and random generators of single ranks, which
    depend on the layout, are left out.

    Exit code 0: equal. 1: different. 2: a mistake.
    """
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="folder of a run")
    add("b", type=Path, metavar="B", help="folder of another run")
    add("--folder", default="checkpoint", help="checkpoint.folder of the runs")
    text = "relative difference that counts as equal"
    add("--tolerance", type=tolerance, default=0.0, metavar="X", help=text)
