"""What a training step costs beside a loop without a trainer.

    ours              the trainer's own loop, assembled from settings as a job is: it reads its
                      data, reports every 10 steps, watches for signals and faults
    bare loop         the same model and optimizer in 40 lines of plain PyTorch, batches at hand
    transformers      LlamaForCausalLM of equal sizes and weights in that bare loop
    Trainer           the same by transformers' Trainer (needs accelerate; one rank)

All are in one process (with --ranks 2 in the same two, under FSDP2) and take turns of --steps
steps. Their losses must agree, else there is no ratio. Peak memory is measured afterwards, of each
in a process of its own: on a GPU what the allocator has handed out, on a CPU the resident set,
less what it was before the model was built.

On a CPU processor seconds of rank 0 are compared too: neighbours that take the processor away count
in the elapsed time alone.

--dtype bfloat16 keeps float32 weights and computes in bfloat16: here and under --ranks by FSDP2's
mixed precision, in the others by autocast on one rank.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.llama_hf import build_llama
from scripts.benchmarks.loops import (
    BETAS,
    EPS,
    LR,
    MAX_NORM,
    WEIGHT_DECAY,
    BareLoop,
    Loop,
    TrainerLoop,
    shard,
)
from scripts.benchmarks.pairs import Comparison, Report, check_close, synchronize
from scripts.benchmarks.ranks import run_ranks
from torchtitan.assemble import assemble, find_model
from torchtitan.base.device import device_name, local_device
from torchtitan.config.load import load_config
from torchtitan.config.schema import ModelConfig
from torchtitan.mesh.process_group import Launch
from torchtitan.metrics.sinks import Row
from torchtitan.models.decoder import Decoder
from torchtitan.models.init import initialize
from torchtitan.parallel.batch import Batch
from torchtitan.trainer import Run, Trainer

SUMMARY = "a training step, against a loop without a trainer and transformers"
BARE, LLAMA, TRAINER = "bare loop", "transformers", "Trainer"
TARGETS = {BARE: "at most 1.02", LLAMA: "at most 1.00", TRAINER: "at most 1.00"}
TOLERANCES = {"float32": 5e-5, "bfloat16": 2e-2}
CLOCKS = ("elapsed", "processor")
STEPS_FOR_MEMORY = 3
GIB = 2**30


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--flavor", default="debugmodel", metavar="NAME", help="size of llama3")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32", help="computed in")
    parser.add_argument("--compile", action="store_true", help="compile all blocks")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="samples a rank")
    parser.add_argument("--seq_len", type=int, default=128, metavar="N", help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="in a measurement")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes, under FSDP2")


def measure(args: argparse.Namespace) -> Report:
    """Let all loops take turns, then measure the memory of each.

    Raises:
        UserError: A setting is refused, or the loops do not train the same.
    """
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "plot")}
    _, architecture = find_model(ModelConfig(flavor=args.flavor))
    settings["tokenizer"] = "bpe_2048" if architecture.vocab_size >= 2048 else "byte"
    load_config(_job(settings, folder=Path("unused")))  # a mistake is one here, before any rank
    others, left_out = _find_others(args)
    settings["others"] = others
    found = run_ranks(take_turns, settings, ranks=args.ranks)
    num_tokens = args.batch * args.seq_len * args.steps * args.ranks
    comparisons = []
    for name in others:
        for clock in CLOCKS if found["device_type"] == "cpu" else CLOCKS[:1]:
            ours, other = found[clock]["ours"], found[clock][name]
            amount = num_tokens if clock == "elapsed" else 0
            row = f"step loop / {name}, {clock}"
            comparisons.append(Comparison(row, TARGETS[name], ours, other, amount, "tokens"))
    memory = {
        name: run_ranks(peak_memory, settings | {"loop": name}, ranks=args.ranks)
        for name in ("ours", *others)
    }
    notes = [
        f"losses agree with the {name} to {gap:.1e}, {TOLERANCES[args.dtype]:g} is allowed"
        for name, gap in found["gaps"].items()
    ]
    notes += [
        f"peak memory of {name}: {peak['above_start_gib']:.3f} GiB above the start of its process"
        for name, peak in memory.items()
    ]
    precision = "float32" if args.dtype == "float32" else "float32 weights, bfloat16 computing"
    return Report(
        about={
            "flavor": args.flavor,
            "batch": args.batch,
            "seq_len": args.seq_len,
            "steps": args.steps,
            "ranks": args.ranks,
            "compile": args.compile,
            "precision": precision,
            "device": found["device"],
            "torch": torch.__version__,
        },
        comparisons=comparisons,
        notes=[*notes, *left_out],
        more={"memory": memory, "gaps": found["gaps"]},
    )


def _find_others(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return whom to compare with, and who is left out and why."""
    missing = {
        name: [module for module in modules if importlib.util.find_spec(module) is None]
        for name, modules in {
            LLAMA: ("transformers",),
            TRAINER: ("transformers", "accelerate"),
        }.items()
    }
    left_out = [
        f"{name} is left out: {' and '.join(modules)} not installed (pip install '.[bench]')"
        for name, modules in missing.items()
        if modules
    ]
    left_out.append("torchtitan 0.2 is left out: it needs a GPU and a Python folder of its own")
    others = [BARE, *(name for name, modules in missing.items() if not modules)]
    if TRAINER in others and (args.ranks > 1 or args.compile):
        others.remove(TRAINER)
        left_out.append("Trainer is left out: it is compared on one rank, not compiled")
    return others, left_out


def _job(settings: dict[str, Any], *, folder: Path) -> list[str]:
    """Return the job as a command line would say it, at a constant learning rate."""
    steps = settings["steps"] * (settings["pairs"] + 1) + 1
    options = {
        "job.dump_folder": folder / "job",
        "model.flavor": settings["flavor"],
        "model.tokenizer_path": settings["tokenizer"],
        "optimizer.lr": LR,
        "optimizer.beta1": BETAS[0],
        "optimizer.beta2": BETAS[1],
        "optimizer.eps": EPS,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.min_lr_factor": 1.0,
        "metrics.log_freq": min(10, settings["steps"]),
        "training.steps": steps,
        "training.seq_len": settings["seq_len"],
        "training.local_batch_size": settings["batch"],
        "training.max_norm": MAX_NORM,
        "training.dataset": "synthetic",
        "training.mixed_precision_param": settings["dtype"],
        "activation_checkpoint.mode": "none",
    }
    if settings["compile"]:
        options["compile.enable"] = "true"
    return [f"--{name}={value}" for name, value in options.items()]


_Spent = dict[str, float]
"""Seconds by each of `CLOCKS`."""


class _Record:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        """Do nothing."""


def _assemble(settings: dict[str, Any], *, launch: Launch, folder: Path) -> Run:
    return assemble(load_config(_job(settings, folder=folder)), launch=launch, color=False)


def _draw_batches(run: Run, num_steps: int) -> list[Batch]:
    """Return the batches of all steps, and put the loader back to where it was."""
    state = run.loader.state_dict()
    batches = [run.shard.take(samples) for _ in range(num_steps) for samples in next(run.loader)]
    run.loader.load_state_dict(state)
    return batches


def _build_other(
    name: str, settings: dict[str, Any], *, device: torch.device, batches: list[Batch], folder: Path
) -> Loop:
    """Build one of the other loops on the initial weights that the library's run starts from."""
    spec, architecture = find_model(ModelConfig(flavor=settings["flavor"]))
    with torch.device("meta"):
        model: Decoder = spec.build(architecture)
    model.to_empty(device=device)
    initialize(model, seed=0)
    other, blocks = model, list(model.layers.values())
    if name != BARE:
        other = build_llama(model)
        blocks = list(other.model.layers)
    if settings["compile"]:
        for block in blocks:
            block.compile()
    computes_low = settings["dtype"] == "bfloat16"
    if settings["ranks"] > 1:
        shard(other, blocks, dtype=getattr(torch, settings["dtype"]))
    autocast = computes_low and settings["ranks"] == 1
    if name == TRAINER:
        return TrainerLoop(other, batches=batches, autocast=autocast, folder=folder)
    logits_of = _decoder_logits if name == BARE else _llama_logits
    return BareLoop(other, logits_of, batches=batches, autocast=autocast)


def _decoder_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    logits_BSV: torch.Tensor = model(batch.tokens)
    return logits_BSV


def _llama_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    logits_BSV: torch.Tensor = model(input_ids=batch.tokens).logits
    return logits_BSV


def take_turns(launch: Launch, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in turns, the others whenever the library's loop has taken its steps.

    The library's loop is never left: the others have their turns where it tells of a step done.
    """
    run, record = _assemble(settings, launch=launch, folder=folder), _Record()
    batches = _draw_batches(run, run.training.steps)
    loops = {
        name: _build_other(name, settings, device=run.device, batches=batches, folder=folder)
        for name in settings["others"]
    }
    spent: dict[str, list[_Spent]] = {name: [] for name in ("ours", *loops)}
    num_steps = settings["steps"]
    started = _clocks()

    def on_step(step: int) -> None:
        nonlocal started
        if step % num_steps:
            return
        spent["ours"].append(_since(started))
        gc.enable()  # the library collects by hand: the others leave it to Python, as scripts do
        for name, loop in loops.items():
            before = _clocks()
            loop.run(num_steps)
            spent[name].append(_since(before))
        gc.disable()
        started = _clocks()

    Trainer(replace(run, sinks=[*run.sinks, record])).train(on_step=on_step)
    rows = [row for row in record.rows if row["step"] < run.training.steps]
    gaps = {
        name: _check(name, loop, rows=rows, dtype=settings["dtype"]) for name, loop in loops.items()
    }
    return {
        **{
            clock: {name: [each[clock] for each in times[1:]] for name, times in spent.items()}
            for clock in CLOCKS
        },
        "gaps": gaps,
        "device": device_name(run.device),
        "device_type": run.device.type,
    }


def _clocks() -> _Spent:
    synchronize()
    return {"elapsed": time.perf_counter(), "processor": time.process_time()}


def _since(start: _Spent) -> _Spent:
    now = _clocks()
    return {clock: now[clock] - start[clock] for clock in CLOCKS}


def _check(name: str, loop: Loop, *, rows: Sequence[Row], dtype: str) -> float:
    losses = loop.losses()
    theirs = [losses[int(row["step"]) - 1] for row in rows]
    ours = [row["loss"] for row in rows]
    return check_close(f"losses of ours and {name}", ours, theirs, tolerance=TOLERANCES[dtype])


def peak_memory(launch: Launch, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps in one loop alone, and return the peak of this rank's memory."""
    name = settings["loop"]
    if name == TRAINER:
        import accelerate  # noqa: F401  before the start, as the library's modules are
    if name in (LLAMA, TRAINER):
        import transformers

        transformers.LlamaForCausalLM  # noqa: B018  loads at the first look
    start = _peak_gib()
    if name == "ours":
        run = _assemble(settings, launch=launch, folder=folder)
        short = replace(run, training=replace(run.training, steps=STEPS_FOR_MEMORY))
        Trainer(short).train()
    else:
        batches = [_random_batch(settings) for _ in range(STEPS_FOR_MEMORY + 1)]
        device = local_device(launch.local_rank)
        loop = _build_other(name, settings, device=device, batches=batches, folder=folder)
        loop.run(STEPS_FOR_MEMORY)
    peak = _peak_gib()
    return {"peak_gib": peak, "above_start_gib": peak - start}


def _random_batch(settings: dict[str, Any]) -> Batch:
    shape = settings["batch"], settings["seq_len"]
    tokens, labels = torch.randint(0, 256, (2, *shape))
    return Batch(tokens=tokens, labels=labels, positions=torch.arange(shape[1]))


def _peak_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
