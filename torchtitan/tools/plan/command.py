"""Plan a job without GPUs: its memory, traffic, layout and step time.

    torchtitan plan memory JOB --world_size 512

The other options are settings of the job, as for the trainer. No other ranks are needed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from torchtitan.base.errors import printable
from torchtitan.base.urls import local_path
from torchtitan.tools.plan.devices import DEVICES, find_device
from torchtitan.tools.verbs import Parser, at_least, build_parser, report_errors

DEVICE = f"{', '.join(DEVICES)} (default H100), a driver's name, or a file of gpu --calibrate"
SETTINGS = "Every other option is a setting of the job, such as --training.seq_len 4096."


@report_errors
def main(argv: Sequence[str]) -> int:
    """Print parts of the answer as they are computed, and return 0."""
    parser = _build_parser()
    arguments, settings = parser.parse_known_args(argv)
    command = arguments.command
    if command == "schedule":
        parser.parse_args(argv)  # it has no job, hence no settings
        from torchtitan.tools.plan.schedule import plan_schedule

        sys.stdout.write(plan_schedule(arguments))
        return 0
    device = find_device(arguments.device, memory_gib=arguments.memory_gib)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes as well
    sys.stderr.write("reading the job\n")  # importing torch takes seconds
    if command == "memory":  # this key of torchtitan asks for the same
        settings = [*settings, "--memory_estimation.enable=false"]
    from torchtitan.tools.plan.job import plan_job

    num, per_node = arguments.world_size, arguments.gpus_per_node
    planned = plan_job(settings, world_size=num, device=device, gpus_per_node=per_node)
    module = import_module(f"torchtitan.tools.plan.{command}")
    for part in getattr(module, f"plan_{command}")(planned, arguments):
        sys.stdout.write(printable(part))
        sys.stdout.flush()
    return 0


def _build_parser() -> Parser:
    parser = build_parser("plan", __doc__)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, summary in {
        "memory": "peak memory of each pipeline rank, and whether it fits",
        "step": "bounds of the time of a step",
        "traffic": "bytes sent over each axis of the mesh",
        "layout": "best degrees, and the job's file for them",
    }.items():
        verb = verbs.add_parser(name, help=summary, epilog=SETTINGS, allow_abbrev=False)
        add = verb.add_argument
        add("--world_size", type=at_least(1), required=True, metavar="N", help="ranks (GPUs)")
        add("--device", default="H100", help=DEVICE)
        add("--memory_gib", type=float, help="memory of the device, if not the usual")
        add("--gpus_per_node", type=at_least(1), default=8, metavar="N", help="per machine (8)")
    add("--global_batch", type=at_least(1), metavar="N", help="samples per step, if not the job's")
    add("--write", type=local_path, metavar="FILE", help="write the best layout's job as TOML")
    summary = "draw a pipeline schedule with its bubble"
    add = verbs.add_parser("schedule", help=summary, allow_abbrev=False).add_argument
    add("--schedule", required=True, help="1F1B, Interleaved1F1B, ZBVZeroBubble, ...")
    add("--pp", type=at_least(1), required=True, help="pipeline ranks")
    add("--stages", type=at_least(1), help="stages over all ranks, by default one or two per rank")
    add("--microbatches", type=at_least(1), required=True, help="microbatches per step")
    return parser
