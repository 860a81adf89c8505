"""What a training step costs beside a loop without a trainer.

    ours              the trainer's own loop, assembled from settings as a job is: it reads its
                      data, reports every 10 steps, watches for signals and faults
    bare loop         the same model and optimizer in 40 lines of plain PyTorch, batches at hand
    transformers      its model of equal sizes and weights in that bare loop
    Trainer           the same by transformers' Trainer (needs accelerate; one rank)

All are in one process (with --ranks 2 in the same two, under FSDP2) and take turns of --steps
steps; with --apart each has a process of its own, one after the other, for models of which a GPU
holds but one. Their losses must agree, else there is no ratio. Peak memory is always that of a
process of its own: on a GPU what the allocator has handed out, on a CPU the resident set, less what
it was before the model was built.

On a CPU processor seconds of rank 0 are compared too: neighbours that take the processor away count
in the elapsed time alone.

--dtype bfloat16 keeps float32 weights and computes in bfloat16: under --ranks by FSDP2's
mixed precision, on one rank by casts where weights are used here, by autocast in the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.pairs import CLOCKS, Comparison, Report
from scripts.benchmarks.ranks import run_ranks
from scripts.benchmarks.turns import (
    BARE,
    OURS,
    THEIRS,
    TOLERANCES,
    TRAINER,
    check_losses,
    describe_job,
    take_all,
    take_turns,
)
from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config
from torchtitan.models.families import MODELS, find_model
from torchtitan.models.settings import ModelConfig

SUMMARY = "a training step, against a loop without a trainer and transformers"
TARGETS = {BARE: "at most 1.02", THEIRS: "at most 1.00", TRAINER: "at most 1.00"}
NEEDS = {THEIRS: ("transformers",), TRAINER: ("transformers", "accelerate")}
FOR_MEMORY = {"steps": 1, "pairs": 2}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--model", choices=list(MODELS), default="llama3", help="family")
    parser.add_argument("--flavor", default="small", metavar="NAME", help="its size")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32", help="computed in")
    parser.add_argument("--compile", action="store_true", help="compile all blocks")
    parser.add_argument(
        "--recompute", choices=["none", "full"], default="none", help="blocks in backward"
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="samples a rank")
    parser.add_argument("--seq_len", type=int, default=128, metavar="N", help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="in a measurement")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes, under FSDP2")
    parser.add_argument("--apart", action="store_true", help="each loop in its own process")
    parser.add_argument(
        "--others",
        nargs="+",
        choices=list(TARGETS),
        default=list(TARGETS),
        metavar="NAME",
        help=f"whom to compare with, of {', '.join(TARGETS)}; all by default",
    )


def measure(args: argparse.Namespace) -> Report:
    """Let all loops take their steps, and measure the memory of each.

    Raises:
        UserError: A setting is refused, or the loops do not train the same.
    """
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "plot")}
    _, architecture = find_model(ModelConfig(name=args.model, flavor=args.flavor))
    settings["tokenizer"] = "bpe_2048" if architecture.vocab_size >= 2048 else "byte"
    load_config(describe_job(settings, folder=Path("unused")))  # before any rank is started
    others, left_out = _find_others(args)
    settings["others"] = others
    found = _run_apart(settings) if args.apart else _run_in_turns(settings)
    gaps = {
        name: check_losses(name, found["losses"][name], rows=found["rows"], dtype=args.dtype)
        for name in others
    }
    notes = [
        f"losses agree with the {name} to {gap:.1e}, {TOLERANCES[args.dtype]:g} is allowed"
        for name, gap in gaps.items()
    ]
    notes += [
        f"peak memory of {name}: {peak['above_start_gib']:.3f} GiB above the start of its process"
        for name, peak in found["memory"].items()
    ]
    utilisation = _utilisation(found, num_tokens=args.batch * args.seq_len * args.steps)
    shares = ", ".join(f"{name} {percent:.1f} %" for name, percent in utilisation.items())
    notes.append(f"of the peak of its device ({found['peak_source']}): {shares}")
    return Report(
        about=_describe(args, device=found["device"]),
        comparisons=_compare(args, found, others=others),
        notes=[*notes, *left_out],
        more={"memory": found["memory"], "gaps": gaps, "mfu": utilisation},
    )


def _describe(args: argparse.Namespace, *, device: str) -> dict[str, Any]:
    names = (
        "model",
        "flavor",
        "batch",
        "seq_len",
        "steps",
        "ranks",
        "compile",
        "recompute",
        "apart",
    )
    precision = "float32" if args.dtype == "float32" else "float32 weights, bfloat16 computing"
    about = {name: getattr(args, name) for name in names}
    return about | {"precision": precision, "device": device, "torch": torch.__version__}


def _run_in_turns(settings: dict[str, Any]) -> dict[str, Any]:
    found = run_ranks(take_turns, settings, ranks=settings["ranks"])
    short = settings | FOR_MEMORY
    memory = {
        name: run_ranks(take_all, short | {"loop": name}, ranks=settings["ranks"])["memory"]
        for name in (OURS, *settings["others"])
    }
    return found | {"memory": memory}


def _run_apart(settings: dict[str, Any]) -> dict[str, Any]:
    alone = {
        name: run_ranks(take_all, settings | {"loop": name}, ranks=settings["ranks"])
        for name in (OURS, *settings["others"])
    }
    return {
        **alone[OURS],
        **{key: {n: each[key] for n, each in alone.items()} for key in ("spent", "losses")},
        "memory": {name: each["memory"] for name, each in alone.items()},
    }


def _compare(
    args: argparse.Namespace, found: Mapping[str, Any], *, others: list[str]
) -> list[Comparison]:
    """Pair the times: with --apart the first of one process with the first of the other."""
    num_tokens = args.batch * args.seq_len * args.steps * args.ranks
    comparisons = []
    for name in others:
        for clock in CLOCKS if found["device_type"] == "cpu" else CLOCKS[:1]:
            ours, other = ([each[clock] for each in found["spent"][n]] for n in (OURS, name))
            amount = num_tokens if clock == "elapsed" else 0
            row = f"step loop / {name}, {clock}"
            comparisons.append(Comparison(row, TARGETS[name], ours, other, amount, "tokens"))
    return comparisons


def _utilisation(found: Mapping[str, Any], *, num_tokens: int) -> dict[str, float]:
    """Return the MFU of each loop, in percent; `num_tokens`: of one rank in a measurement."""
    return {
        name: 100
        * (num_tokens * found["flops_per_token"] / found["peak_flops"])
        / statistics.median(each["elapsed"] for each in times)
        for name, times in found["spent"].items()
    }


def _find_others(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return whom to compare with, and who is left out and why.

    Raises:
        ConfigError: None of those asked for is there.
    """
    missing = {
        name: [module for module in modules if importlib.util.find_spec(module) is None]
        for name, modules in NEEDS.items()
        if name in args.others
    }
    left_out = [
        f"{name} is left out: {' and '.join(modules)} not installed (pip install -e '.[bench]')"
        for name, modules in missing.items()
        if modules
    ]
    left_out.append(
        "torchtitan 0.2 and litgpt are left out: the one needs a GPU and a Python folder of its "
        "own, the other brings Lightning with it"
    )
    others = [name for name in args.others if not missing.get(name)]
    if TRAINER in others and args.ranks > 1:
        others.remove(TRAINER)
        left_out.append("Trainer is left out: it is compared on one rank")
    if not others:
        raise ConfigError(f"--others leaves nobody to compare with: {'; '.join(left_out)}")
    return others, left_out
