"""Plan before you pay.

    python -m torchtitan plan memory --job.config_file F --world_size 512

Needs no GPU and no other ranks. What is not an option of the command is a setting of the job, as
the trainer takes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from torchtitan.base.errors import UserError, printable
from torchtitan.base.urls import local_path
from torchtitan.tools.plan.devices import DEVICES, find_device
from torchtitan.tools.plan.explain import add_explain, explain
from torchtitan.tools.plan.job import Planned, plan_job
from torchtitan.tools.plan.layout import plan_layout
from torchtitan.tools.plan.memory import plan_memory
from torchtitan.tools.plan.step import plan_step
from torchtitan.tools.plan.timelines import add_schedule, draw_schedule
from torchtitan.tools.plan.traffic import plan_traffic

Answer = str | Iterator[str]
"""As a whole, or part by part as it is found."""
OF_A_JOB: Mapping[str, tuple[str, Callable[[Planned, argparse.Namespace], Answer]]] = {
    "memory": ("tell what each pipeline rank's memory holds, and whether it fits", plan_memory),
    "traffic": ("tell what is sent over each axis of the mesh", plan_traffic),
    "layout": ("find the degrees to take, and write the job's file for them", plan_layout),
    "step": ("tell between which bounds the time of a step lies, and what binds", plan_step),
}
OTHERS: Mapping[str, Callable[[argparse.Namespace], str]] = {
    "schedule": draw_schedule,
    "explain": explain,
}
OF_DEVICE = (
    f"{', '.join(DEVICES)} (H100), or a driver's name of one, or a file of "
    "`scripts/benchmark.py gpu --calibrate`"
)


def main(argv: Sequence[str]) -> int:
    """Print what is asked for and return 0, or print one line for each mistake and return 2."""
    arguments, settings = _parser().parse_known_args(argv)
    try:
        answer = _answer(arguments, settings)
        for part in [answer] if isinstance(answer, str) else answer:
            sys.stdout.write(printable(part))
            sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _answer(arguments: argparse.Namespace, settings: Sequence[str]) -> Answer:
    if arguments.command in OTHERS:
        if settings:
            _parser().error(f"unrecognized arguments: {' '.join(settings)}")
        return OTHERS[arguments.command](arguments)
    if arguments.command == "memory":  # it does what this key of torchtitan asks for
        settings = [*settings, "--memory_estimation.enable=false"]
    planned = plan_job(
        settings,
        world_size=arguments.world_size,
        device=find_device(arguments.device, memory_gib=arguments.memory_gib),
        gpus_per_node=arguments.gpus_per_node,
        all_ranks=getattr(arguments, "all_ranks", False),
    )
    return OF_A_JOB[arguments.command][1](planned, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan plan", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, (summary, _) in OF_A_JOB.items():
        command = commands.add_parser(name, help=summary, allow_abbrev=False)
        command.add_argument("--world_size", type=int, required=True, help="ranks of the job")
        command.add_argument("--device", default="H100", help=OF_DEVICE)
        command.add_argument("--memory_gib", type=float, help="its memory, if not the usual")
        command.add_argument("--gpus_per_node", type=int, default=8, help="of a machine (8)")
        if name != "layout":
            command.add_argument(
                "--all_ranks",
                action="store_true",
                help="look at every rank of a pipeline of more than 4, not only at its ends and "
                "at those between that hold most",
            )
        if name == "layout":
            command.add_argument(
                "--global_batch", type=int, metavar="N", help="samples of a step (as the job has)"
            )
            command.add_argument(
                "--write", type=local_path, metavar="FILE", help="write the best as TOML"
            )
        if name == "traffic":
            command.add_argument("--by_module", action="store_true", help="a row for each module")
        if name == "memory":
            command.add_argument(
                "--out", type=local_path, metavar="FILE", help="draw an .svg or .png"
            )
            command.add_argument(
                "--classic_allocator",
                action="store_true",
                help="without PYTORCH_ALLOC_CONF=expandable_segments:True",
            )
            command.add_argument(
                "--ran_out",
                action="store_true",
                help="the job ran out of memory: plan remedies, though it may fit",
            )
    add_schedule(commands)
    add_explain(commands)
    return parser
