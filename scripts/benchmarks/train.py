"""A training step beside a bare loop of the same model, and of that of transformers.

    trainer       built from settings as a job is: it reads data, logs every 10 steps, and
                  handles signals and failures
    bare loop     the same model and optimizer in plain PyTorch, with all batches in memory
    transformers  its model with equal sizes and weights in that bare loop

All loops are in one process (with --ranks 2 in the same two, under FSDP2) and take turns of --steps
steps; with --apart each has a process of its own, for models too large for one GPU. Their losses
must agree. Peak memory is always measured in a process of its own: allocated memory on a GPU, else
the resident set, minus that before the model was built. On a CPU the processor time of rank 0 is
compared too, because load from other processes affects only the elapsed time.

--dtype bfloat16 keeps float32 weights and computes in bfloat16: by FSDP2 with several ranks, else
by casts of the weights in the library and by autocast in the other loops.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.pairs import CLOCKS, Comparison, Report, compare_times
from scripts.benchmarks.ranks import run_ranks
from scripts.benchmarks.turns import (
    BARE,
    OURS,
    THEIRS,
    TOLERANCES,
    check_losses,
    describe_job,
    run_loops,
)
from torchtitan.job import load_config
from torchtitan.models.families import MODELS, find_model
from torchtitan.models.settings import ModelConfig

TARGETS = {BARE: "at most 1.02", THEIRS: "at most 1.00"}
FOR_MEMORY = {"steps": 1, "pairs": 2}
ABOUT = ("model", "flavor", "dtype", "batch", "seq_len", "steps", "ranks", "compile", "recompute")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--model", choices=list(MODELS), default="llama3", help="family")
    parser.add_argument("--flavor", default="small", metavar="NAME", help="size of the model")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32", help="of compute")
    parser.add_argument("--compile", action="store_true", help="compile all blocks")
    parser.add_argument(
        "--recompute",
        choices=("none", "full"),
        default="none",
        help="full: all blocks",
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="samples per rank")
    parser.add_argument("--seq_len", type=int, default=128, metavar="N", help="tokens per sample")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="per measurement")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes, under FSDP2")
    parser.add_argument("--apart", action="store_true", help="each loop in its own process")
    parser.add_argument(
        "--others",
        nargs="+",
        choices=list(TARGETS),
        metavar="NAME",
        default=list(TARGETS),
        help=f"loops to compare with, of {', '.join(TARGETS)}",
    )


def measure(args: argparse.Namespace) -> Report:
    """Run all loops in turn, and measure the memory of each.

    Raises:
        UserError: A setting is refused, or the losses differ.
    """
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    _, architecture = find_model(ModelConfig(name=args.model, flavor=args.flavor))
    settings["tokenizer"] = "bpe_2048" if architecture.vocab_size >= 2048 else "byte"
    load_config(describe_job(settings, folder=Path("unused")))  # before any rank starts
    others, skipped = list(args.others), []
    if THEIRS in others and importlib.util.find_spec("transformers") is None:
        others.remove(THEIRS)
        skipped = [f"{THEIRS} is skipped: not installed (pip install -e '.[bench]')"]
    found = _run_all(settings, names=[OURS, *others])
    gaps = {
        name: check_losses(name, found["losses"][name], rows=found["rows"], dtype=args.dtype)
        for name in others
    }
    notes = [
        f"losses agree with {name} to {gap:.1e}, tolerance {TOLERANCES[args.dtype]:g}"
        for name, gap in gaps.items()
    ]
    notes += [
        f"peak memory of {name}: {peak['above_start_gib']:.3f} GiB above the start of its process"
        for name, peak in found["memory"].items()
    ]
    num_tokens = args.batch * args.seq_len * args.steps
    mfu = _utilization(found, num_tokens=num_tokens)
    notes += [f"MFU of {name}: {percent:.1f} %" for name, percent in mfu.items()]
    comparisons: list[Comparison] = []
    for name in others:
        comparisons += compare_times(
            f"step loop / {name}",
            TARGETS[name],
            found["spent"][OURS],
            found["spent"][name],
            clocks=CLOCKS if found["device_type"] == "cpu" else CLOCKS[:1],
            amount=num_tokens * args.ranks,
            unit="tokens",
        )
    about = {name: getattr(args, name) for name in ABOUT}
    return Report(
        about=about | {"device": found["device"], "torch": torch.__version__},
        comparisons=comparisons,
        notes=[*notes, *skipped],
        more={"memory": found["memory"], "gaps": gaps, "mfu": mfu},
    )


def _run_all(settings: dict[str, Any], *, names: list[str]) -> dict[str, Any]:
    """Run the loops in turn or apart; memory is that of each loop's own process."""

    def run(loops: list[str], **changed: int) -> dict[str, Any]:
        return run_ranks(run_loops, settings | changed | {"loops": loops}, ranks=settings["ranks"])

    if not settings["apart"]:
        found = run(names)
        return found | {"memory": {name: run([name], **FOR_MEMORY)["memory"] for name in names}}
    alone = {name: run([name]) for name in names}
    merged = {
        key: {name: times for each in alone.values() for name, times in each[key].items()}
        for key in ("spent", "losses")
    }
    return alone[OURS] | merged | {"memory": {name: each["memory"] for name, each in alone.items()}}


def _utilization(found: Mapping[str, Any], *, num_tokens: int) -> dict[str, float]:
    """Return the MFU of each loop in percent; `num_tokens` is per rank and measurement."""
    if found["peak_flops"] is None:
        return {}
    least = num_tokens * found["flops_per_token"] / found["peak_flops"]
    return {
        name: 100 * least / statistics.median(each["elapsed"] for each in times)
        for name, times in found["spent"].items()
    }
