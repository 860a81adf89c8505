"""Average the weights of a run's checkpoints.

    python -m torchtitan average outputs/run --out DIR

The average of the last checkpoints is often better than the last one, as if the learning rate had
decayed further. Trainers keep such an average (EMA) in memory, with a decay chosen before the run.
This command makes it after the run, from checkpoints w_1 ... w_k in the order of their steps:

    uniform   m = (w_1 + ... + w_k) / k             (stochastic weight averaging, arXiv 1803.05407)
    ema       m_1 = w_1,  m_i = d m_{i-1} + (1 - d) w_i           (Polyak averaging; d is --decay)

The EMA starts at w_1, so it needs no bias correction. The decay is per checkpoint, not per step:
for a decay c per training step and checkpoints every n steps, give d = c^n.

Sums are in float64, and each element is rounded once, to its stored type. A few million elements
are read from every checkpoint, averaged and written at a time, so memory depends neither on the
size of the model nor on the number of checkpoints. The result is a step with only weights and the
settings of the last checkpoint; `torchtitan convert to-hf` makes a Hugging Face folder of it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from itertools import pairwise

from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import CheckpointError
from torchtitan.base.log import plural
from torchtitan.base.urls import local_path
from torchtitan.tools.verbs import build_parser, report_errors


@report_errors
def main(argv: Sequence[str]) -> int:
    """Write the average and return 0; return 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    _check(args)
    from torchtitan.checkpoint.storage import step_of
    from torchtitan.tools.average.average import average, check_alike, find_steps

    if step_of(args.out) is not None:
        raise CheckpointError(f"--out must not have the name of a run's step, got {args.out.name}")
    steps = find_steps(args.checkpoint, steps=args.steps, checksums=not args.skip_verify)
    with trusting_stored(args.trust_code):
        check_alike([*steps.values()])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        average([*steps.values()], args.out, method=args.kind, decay=args.decay)
    names = f"{plural(len(steps), 'step')}: {', '.join(map(str, steps))}"
    sys.stdout.write(f"{args.out}: the {args.kind} average of {names}\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.out.exists():
        raise CheckpointError(f"{args.out} exists; name a new folder")
    if not 0 < args.decay < 1:
        raise CheckpointError(f"--decay must be between 0 and 1, got {args.decay}")
    if args.steps is not None and any(a >= b for a, b in pairwise(args.steps)):
        raise CheckpointError(f"--steps must be ascending, each once, got {args.steps}")


def _steps(text: str) -> list[int]:
    return [int(step) for step in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("average", __doc__)
    add = parser.add_argument
    add("checkpoint", type=local_path, help="folder of a run, or of checkpoints")
    add("--out", type=local_path, required=True, help="folder to create")
    add("--steps", type=_steps, help="such as 100,200,300; default: all")
    add("--kind", choices=("uniform", "ema"), default="uniform")
    add("--decay", type=float, default=0.9, help="of ema, per checkpoint (0.9)")
    add("--skip_verify", action="store_true", help="do not verify checksums")
    add_trust_code(parser)
    return parser
