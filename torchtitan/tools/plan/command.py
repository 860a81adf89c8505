"""Plan a job without GPUs: its memory, traffic, layout and step time.

    torchtitan plan memory --job.config_file F --world_size 512

The other options are settings of the job, as for the trainer. No other ranks are needed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import FrameType
from typing import NamedTuple, NoReturn

from torchtitan.base.errors import ConfigError, UserError, did_you_mean, printable
from torchtitan.base.urls import local_path
from torchtitan.data.workers import worker_context
from torchtitan.tools.plan.devices import DEVICES, find_device

Parser = argparse.ArgumentParser
Answer = str | Iterator[str]
"""Text, in one part or in parts that are printed as they are found."""
DEVICE = (
    f"{', '.join(DEVICES)} (default H100), a driver's name of one of them, or a file of "
    "`scripts/benchmark.py gpu --calibrate`"
)
SETTINGS = (
    "Every other option is a setting of the job, as for the trainer: --job.config_file FILE, "
    "--training.seq_len 4096."
)
STOPS = (signal.SIGTERM, signal.SIGINT)
RANKS = ("gpu", "rank", "proc", "device", "ngpu", "world", "nnodes")
"""Parts of names under which other programs take the number of ranks."""


class Verb(NamedTuple):
    """A function of a module, which is imported when the verb runs."""

    summary: str
    module: str
    function: str
    plans_job: bool = True


VERBS: Mapping[str, Verb] = {
    "memory": Verb(
        "peak memory of each pipeline rank, and whether it fits", "memory", "plan_memory"
    ),
    "traffic": Verb("bytes sent over each axis of the mesh", "traffic", "plan_traffic"),
    "layout": Verb("best degrees, and the job's file for them", "layout", "plan_layout"),
    "step": Verb("bounds of the time of a step", "step", "plan_step"),
    "schedule": Verb(
        "draw a pipeline schedule with its bubble", "schedule", "plan_schedule", False
    ),
}


def main(argv: Sequence[str]) -> int:
    """Print the answer and return 0, or print one line for each mistake and return 2.

    SIGTERM and Ctrl-C end the command with code 128 + n, after its processes have ended.
    """
    arguments, settings = _parser().parse_known_args(argv)
    before = {number: signal.signal(number, _stop) for number in STOPS}
    try:
        answer = _answer(arguments, settings)
        for part in [answer] if isinstance(answer, str) else answer:
            sys.stdout.write(printable(part))
            sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _stop(number: int, _: FrameType | None) -> NoReturn:
    sys.stderr.write(f"\nstopped by {signal.Signals(number).name}\n")
    raise SystemExit(128 + number)


def _answer(arguments: argparse.Namespace, settings: Sequence[str]) -> Answer:
    verb = VERBS[arguments.command]
    module = f"torchtitan.tools.plan.{verb.module}"
    if not verb.plans_job:
        if settings:
            _parser().error(f"unrecognized arguments: {' '.join(settings)}")
        answer: Callable[..., Answer] = getattr(import_module(module), verb.function)
        return answer(arguments)
    _check_options(settings, options=vars(arguments))
    if arguments.world_size is None:
        raise ConfigError("--world_size must be set to the number of ranks (GPUs) of the job")
    device = find_device(arguments.device, memory_gib=arguments.memory_gib)
    sys.stderr.write("reading the job\n")  # importing torch takes seconds
    if arguments.command == "layout":  # the server of processes imports in parallel
        worker_context(preload="torchtitan.tools.plan.ranks")
    from torchtitan.tools.plan.job import plan_job

    answer = getattr(import_module(module), verb.function)
    if arguments.command == "memory":  # this key of torchtitan asks for the same
        settings = [*settings, "--memory_estimation.enable=false"]
    planned = plan_job(
        settings,
        world_size=arguments.world_size,
        device=device,
        gpus_per_node=arguments.gpus_per_node,
    )
    return answer(planned, arguments)


def _check_options(words: Sequence[str], *, options: Mapping[str, object]) -> None:
    """Refuse options that are neither the command's nor, by their dot, a setting."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--") or "." in name:
            continue
        is_number = any(part in name.replace("-", "_") for part in RANKS)
        hint = "; did you mean --world_size?" if is_number else did_you_mean(name, options)
        raise ConfigError(
            f"--{name} must be an option of `plan {options['command']}` (see --help) or a setting "
            f"such as --training.seq_len{hint}"
        )


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="torchtitan plan",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, verb in VERBS.items():
        command = commands.add_parser(
            name,
            help=verb.summary,
            epilog=SETTINGS if verb.plans_job else None,
            allow_abbrev=False,
        )
        if verb.plans_job:
            add = command.add_argument
            add("--world_size", type=int, metavar="N", help="number of ranks (GPUs); required")
            add("--device", default="H100", help=DEVICE)
            add("--memory_gib", type=float, help="memory of the device, if not the usual")
            add("--gpus_per_node", type=int, default=8, help="GPUs per machine (8)")
        if name in ADD_OPTIONS:
            ADD_OPTIONS[name](command)
    return parser


def _add_traffic(parser: Parser) -> None:
    parser.add_argument("--by_module", action="store_true", help="a row for each module")


def _add_layout(parser: Parser) -> None:
    add = parser.add_argument
    add("--global_batch", type=int, metavar="N", help="samples per step, if not the job's")
    add("--write", type=local_path, metavar="FILE", help="write the best layout's job as TOML")


def _add_schedule(parser: Parser) -> None:
    add = parser.add_argument
    add("--schedule", metavar="NAME", help="1F1B, Interleaved1F1B, ZBVZeroBubble, ...")
    add("--pp", type=int, help="pipeline ranks")
    add("--stages", type=int, help="stages over all ranks, by default one or two per rank")
    add("--microbatches", type=int, help="microbatches per step")
    for name in ("forward", "backward_input", "backward_weight"):
        add(f"--{name}", type=float, help="relative cost (1)")
    add("--transfer", type=float, help="cost of a transfer to another rank (0)")


ADD_OPTIONS: Mapping[str, Callable[[Parser], None]] = {
    "traffic": _add_traffic,
    "layout": _add_layout,
    "schedule": _add_schedule,
}
