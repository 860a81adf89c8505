"""The rank function that builds the loops of `train` and runs them in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.benchmarks.loops import (
    BETAS,
    EPS,
    LR,
    MAX_NORM,
    WEIGHT_DECAY,
    BareLoop,
    build_theirs,
    shard,
)
from scripts.benchmarks.pairs import Spent, check_close, read_clocks, spent_since, timed
from torchtitan.base.device import device_name, local_device, memory_peak_gib, peak_flops
from torchtitan.build import build_loader, build_run, build_training_samples
from torchtitan.job import load_config
from torchtitan.layout import find_layout
from torchtitan.mesh.dims import build_mesh
from torchtitan.mesh.ranks import OncePerMachine, RankInfo
from torchtitan.metrics.rows import Row
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import find_model
from torchtitan.models.init import initialize
from torchtitan.models.interface import count
from torchtitan.models.settings import ModelConfig
from torchtitan.parallel.activation import apply_activation_checkpointing
from torchtitan.parallel.context.shard import build_shard
from torchtitan.parallel.execution import Batch
from torchtitan.trainer import Run, Trainer

OURS, BARE, THEIRS = "ours", "bare loop", "transformers"
TOLERANCES = {"float32": 5e-5, "bfloat16": 2e-2}


def describe_job(settings: dict[str, Any], *, folder: Path) -> list[str]:
    """Return the job's command line, with a constant learning rate."""
    options = {
        "job.dump_folder": folder / "job",
        "model.name": settings["model"],
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
        "training.steps": settings["steps"] * (settings["pairs"] + 1) + 1,
        "training.seq_len": settings["seq_len"],
        "training.local_batch_size": settings["batch"],
        "training.max_norm": MAX_NORM,
        "training.dataset": "synthetic",
        "training.mixed_precision_param": settings["dtype"],
        "activation_checkpoint.mode": settings["recompute"],
    }
    if settings["compile"]:
        options["compile.enable"] = "true"
    return [f"--{name}={value}" for name, value in options.items()]


def build_job(settings: dict[str, Any], *, launch: RankInfo, folder: Path) -> Run:
    """Build the library's run as a job builds it."""
    config = load_config(describe_job(settings, folder=folder))
    return build_run(config, launch=launch, color=False, cleanup=ExitStack())


def load_batches(settings: dict[str, Any], *, device: torch.device, folder: Path) -> list[Batch]:
    """Return the batches that this rank's run reads in all steps."""
    config = load_config(describe_job(settings, folder=folder))
    layout = find_layout(config, world_size=settings["ranks"])
    mesh = build_mesh(layout.dims, device_type=device.type)
    samples = build_training_samples(config, layout=layout, once=OncePerMachine())
    loader = build_loader(config, samples=samples, layout=layout, mesh=mesh)
    part = build_shard(config.parallelism, training=config.training, mesh=mesh)
    return [part.take(samples) for _ in range(config.training.steps) for samples in next(loader)]


def build_other(
    name: str, settings: dict[str, Any], *, device: torch.device, batches: list[Batch]
) -> BareLoop:
    """Build a loop other than the trainer's, with the same initial weights."""
    spec, architecture = find_model(ModelConfig(name=settings["model"], flavor=settings["flavor"]))
    with torch.device("meta"):
        model: Decoder = spec.build(architecture)
    model.to_empty(device=device)
    initialize(model, seed=0)
    other, blocks = model, list(model.layers.values())
    if name != BARE:
        other = build_theirs(model, spec)
        blocks = list(other.model.layers)
        if settings["recompute"] == "full":
            other.gradient_checkpointing_enable({"use_reentrant": False})
    if settings["compile"]:
        for block in blocks:
            block.compile()
    if name == BARE:
        apply_activation_checkpointing(model, mode=settings["recompute"], option="1")
    if settings["ranks"] > 1:
        shard(other, blocks, dtype=getattr(torch, settings["dtype"]))
    autocast = settings["dtype"] == "bfloat16" and settings["ranks"] == 1

    def logits_of(model: Any, tokens_BS: Tensor) -> Any:
        return model(tokens_BS) if name == BARE else model(input_ids=tokens_BS).logits

    return BareLoop(other, logits_of, batches=batches, autocast=autocast)


class _Record:
    """A sink that keeps all rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        """Do nothing."""


def run_loops(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with the loops `settings["loops"]` in turn.

    The trainer's loop is never left: the other loops run in its callback after each turn.

    Returns:
        Times per turn, losses, logged rows, and the peak memory of this process.
    """
    names, num_steps = settings["loops"], settings["steps"]
    device = local_device(launch.local_rank)
    batches = load_batches(settings, device=device, folder=folder)
    if THEIRS in names:  # before memory is measured, as for the library
        import transformers

        transformers.AutoModelForCausalLM  # noqa: B018  loads on first access
    start = memory_peak_gib(device)
    loops = {
        name: build_other(name, settings, device=device, batches=batches)
        for name in names
        if name != OURS
    }
    spent: dict[str, list[Spent]] = {name: [] for name in names}
    rows: list[Row] = []
    peaks: list[float] = []

    def take_turns() -> None:
        for name, loop in loops.items():
            spent[name].append(timed(lambda loop=loop: loop.run(num_steps)))  # type: ignore[misc]

    if OURS in names:
        run, record = build_job(settings, launch=launch, folder=folder), _Record()
        run = replace(run, sinks=[*run.sinks, record])
        _train(run, num_steps=num_steps, spent=spent[OURS], between=take_turns)
        rows = [row for row in record.rows if row["step"] < run.training.steps]
        peaks = [row["memory_peak_gib"] for row in record.rows]  # each resets a GPU's peak
    else:
        for _ in range(settings["pairs"] + 1):
            take_turns()
    peak = max([memory_peak_gib(device), *peaks])
    return {
        "spent": {name: times[1 : settings["pairs"] + 1] for name, times in spent.items()},
        "losses": {name: loop.losses() for name, loop in loops.items()},
        "rows": rows,
        "memory": {"peak_gib": peak, "above_start_gib": peak - start},
        **_about(settings, device=device),
    }


def _train(run: Run, *, num_steps: int, spent: list[Spent], between: Callable[[], None]) -> None:
    started = read_clocks()

    def on_step(step: int) -> None:
        nonlocal started
        if step % num_steps:
            return
        spent.append(spent_since(started))
        gc.enable()  # only the library collects at fixed steps
        between()
        gc.disable()
        started = read_clocks()

    Trainer(run).train(on_step=on_step)


def _about(settings: dict[str, Any], *, device: torch.device) -> dict[str, Any]:
    spec, architecture = find_model(ModelConfig(name=settings["model"], flavor=settings["flavor"]))
    counts = count(spec.build_meta(architecture))
    peak = peak_flops(device, dtype=getattr(torch, settings["dtype"]))
    return {
        "device": device_name(device),
        "device_type": device.type,
        "flops_per_token": counts.flops_per_token(settings["seq_len"]),
        "peak_flops": peak.value if peak else None,
    }


def check_losses(name: str, losses: Sequence[float], *, rows: Sequence[Row], dtype: str) -> float:
    """Return the largest difference between `losses` of all steps and those of logged rows.

    Raises:
        DisagreementError: It exceeds the tolerance of `dtype`.
    """
    logged = [row["loss"] for row in rows]
    other = [losses[int(row["step"]) - 1] for row in rows]
    return check_close(f"losses with {name}", logged, other, tolerance=TOLERANCES[dtype])
