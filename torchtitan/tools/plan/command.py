"""Plan a job without GPUs: its memory, traffic, layout and step time.

    torchtitan plan memory --job.config_file F --world_size 512

The other options are settings of the job, as for the trainer. No other ranks are needed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

from torchtitan.base.errors import ConfigError, UserError, did_you_mean, printable
from torchtitan.base.urls import local_path
from torchtitan.data.workers import worker_context
from torchtitan.tools.plan.devices import DEVICES, find_device

DEVICE = (
    f"{', '.join(DEVICES)} (default H100), a driver's name of one of them, or a file of "
    "`scripts/benchmark.py gpu --calibrate`"
)
SETTINGS = (
    "Every other option is a setting of the job, as for the trainer: --job.config_file FILE, "
    "--training.seq_len 4096."
)


def main(argv: Sequence[str]) -> int:
    """Print the answer and return 0, or print one line for each mistake and return 2.

    SIGTERM and Ctrl-C end the command with code 130, after its processes have ended.
    """
    parser = _parser()
    arguments, settings = parser.parse_known_args(argv)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for part in _answer(parser, arguments, settings):
            sys.stdout.write(printable(part))
            sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _answer(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, settings: Sequence[str]
) -> Iterator[str]:
    """Yield parts of the answer as they are computed."""
    command = arguments.command
    if command == "schedule":
        if settings:
            parser.error(f"unrecognized arguments: {' '.join(settings)}")
        from torchtitan.tools.plan.schedule import plan_schedule

        yield plan_schedule(arguments)
        return
    for word in settings:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and "." not in name:
            raise ConfigError(
                f"--{name} must be an option of `plan {command}` (see --help), such as "
                "--world_size, or a setting such as --training.seq_len"
                f"{did_you_mean(name, vars(arguments))}"
            )
    if arguments.world_size is None:
        raise ConfigError("--world_size must be set to the number of ranks (GPUs) of the job")
    device = find_device(arguments.device, memory_gib=arguments.memory_gib)
    sys.stderr.write("reading the job\n")  # importing torch takes seconds
    if command == "layout":  # the server of processes imports in parallel
        worker_context(preload="torchtitan.tools.plan.ranks")
    if command == "memory":  # this key of torchtitan asks for the same
        settings = [*settings, "--memory_estimation.enable=false"]
    from torchtitan.tools.plan.job import plan_job

    planned = plan_job(
        settings,
        world_size=arguments.world_size,
        device=device,
        gpus_per_node=arguments.gpus_per_node,
    )
    module = import_module(f"torchtitan.tools.plan.{command}")
    yield from getattr(module, f"plan_{command}")(planned, arguments)


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="torchtitan plan",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def add_verb(name: str, summary: str) -> Callable[..., object]:
        verb = verbs.add_parser(name, help=summary, epilog=SETTINGS, allow_abbrev=False)
        add = verb.add_argument
        add("--world_size", type=int, metavar="N", help="number of ranks (GPUs); required")
        add("--device", default="H100", help=DEVICE)
        add("--memory_gib", type=float, help="memory of the device, if not the usual")
        add("--gpus_per_node", type=int, default=8, help="GPUs per machine (8)")
        return add

    add_verb("memory", "peak memory of each pipeline rank, and whether it fits")
    add_verb("step", "bounds of the time of a step")
    add = add_verb("traffic", "bytes sent over each axis of the mesh")
    add("--by_module", action="store_true", help="a row for each module")
    add = add_verb("layout", "best degrees, and the job's file for them")
    add("--global_batch", type=int, metavar="N", help="samples per step, if not the job's")
    add("--write", type=local_path, metavar="FILE", help="write the best layout's job as TOML")
    summary = "draw a pipeline schedule with its bubble"
    add = verbs.add_parser("schedule", help=summary, allow_abbrev=False).add_argument
    add("--schedule", metavar="NAME", help="1F1B, Interleaved1F1B, ZBVZeroBubble, ...")
    add("--pp", type=int, help="pipeline ranks")
    add("--stages", type=int, help="stages over all ranks, by default one or two per rank")
    add("--microbatches", type=int, help="microbatches per step")
    for name in ("forward", "backward_input", "backward_weight"):
        add(f"--{name}", type=float, default=1.0, help="relative cost (1)")
    add("--transfer", type=float, default=0.0, help="cost of a transfer to another rank (0)")
    return parser
