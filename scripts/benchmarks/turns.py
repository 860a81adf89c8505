"""The loops that `train` compares, built on a rank and run: in turns in one process, or each alone.

Turns are for machines with neighbours, which then disturb all alike. A process of its own is for
memory, and for models of which a GPU holds but one.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

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
from scripts.benchmarks.pairs import Spent, check_close, read_clocks, spent_since
from scripts.benchmarks.theirs import build_theirs
from torchtitan.base.device import PeakFlops, device_name, local_device, peak_flops
from torchtitan.build import build_loader, build_run, build_training_samples
from torchtitan.checkpoint.state import Progress
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
from torchtitan.tools.check.speed import multiply
from torchtitan.trainer import Run, Trainer

OURS, BARE, THEIRS, TRAINER = "ours", "bare loop", "transformers", "Trainer"
TOLERANCES = {"float32": 5e-5, "bfloat16": 2e-2}
GIB = 2**30


def describe_job(settings: dict[str, Any], *, folder: Path) -> list[str]:
    """Return the job as a command line would say it, at a constant learning rate."""
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
        "training.steps": _num_steps(settings),
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


def _named(settings: dict[str, Any]) -> ModelConfig:
    return ModelConfig(name=settings["model"], flavor=settings["flavor"])


def _num_steps(settings: dict[str, Any]) -> int:
    num_steps: int = settings["steps"] * (settings["pairs"] + 1) + 1
    return num_steps


class _Record:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        """Do nothing."""


def assemble_ours(settings: dict[str, Any], *, launch: RankInfo, folder: Path) -> Run:
    """Build the library's run as a job is built."""
    return build_run(
        load_config(describe_job(settings, folder=folder)),
        launch=launch,
        color=False,
        undo=ExitStack(),
    )


def load_batches(settings: dict[str, Any], *, device: torch.device, folder: Path) -> list[Batch]:
    """Return the batches of all steps, as this rank's run reads them."""
    config = load_config(describe_job(settings, folder=folder))
    layout = find_layout(config, world_size=settings["ranks"])
    mesh = build_mesh(layout.dims, device_type=device.type)
    samples = build_training_samples(config, layout=layout, once=OncePerMachine())
    loader = build_loader(config, samples=samples, layout=layout, mesh=mesh, progress=Progress())
    part = build_shard(config.parallelism, training=config.training, mesh=mesh)
    return [part.take(samples) for _ in range(config.training.steps) for samples in next(loader)]


def build_other(
    name: str, settings: dict[str, Any], *, device: torch.device, batches: list[Batch], folder: Path
) -> Loop:
    """Build one of the other loops on the initial weights that the library's run starts from."""
    spec, architecture = find_model(_named(settings))
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
    computes_low = settings["dtype"] == "bfloat16"
    if settings["ranks"] > 1:
        shard(other, blocks, dtype=getattr(torch, settings["dtype"]))
    autocast = computes_low and settings["ranks"] == 1
    if name == TRAINER:
        return TrainerLoop(other, batches=batches, autocast=autocast, folder=folder)
    logits_of = _decoder_logits if name == BARE else _their_logits
    return BareLoop(other, logits_of, batches=batches, autocast=autocast)


def _decoder_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    logits_BSV: torch.Tensor = model(batch.tokens)
    return logits_BSV


def _their_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    logits_BSV: torch.Tensor = model(input_ids=batch.tokens).logits
    return logits_BSV


def take_turns(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in turns, the others whenever the library's loop has taken its steps.

    The library's loop is never left: the others have their turns where it tells of a step done.
    """
    device = local_device(launch.local_rank)
    batches = load_batches(settings, device=device, folder=folder)
    run, record = assemble_ours(settings, launch=launch, folder=folder), _Record()
    loops = {
        name: build_other(name, settings, device=device, batches=batches, folder=folder)
        for name in settings["others"]
    }
    spent: dict[str, list[Spent]] = {name: [] for name in (OURS, *loops)}
    num_steps = settings["steps"]
    started = read_clocks()

    def on_step(step: int) -> None:
        nonlocal started
        if step % num_steps:
            return
        spent[OURS].append(spent_since(started))
        gc.enable()  # the library collects by hand: the others leave it to Python, as scripts do
        for name, loop in loops.items():
            before = read_clocks()
            loop.run(num_steps)
            spent[name].append(spent_since(before))
        gc.disable()
        started = read_clocks()

    Trainer(replace(run, sinks=[*run.sinks, record])).train(on_step=on_step)
    losses = {name: loop.losses() for name, loop in loops.items()}
    return {
        "spent": {name: times[1:] for name, times in spent.items()},
        "losses": losses,
        "rows": _rows_before(record.rows, run.training.steps),
        **_about(settings, device=device),
    }


def take_all(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train in one loop alone; tell its times, losses, and the peak of this rank's memory."""
    name, num_steps = settings["loop"], settings["steps"]
    device = local_device(launch.local_rank)
    batches = load_batches(settings, device=device, folder=folder)
    _import_peer(name)
    start = peak_gib()
    spent: list[Spent] = []
    rows: list[Row] = []
    losses: list[float] = []
    if name == OURS:
        run, record = assemble_ours(settings, launch=launch, folder=folder), _Record()
        started = read_clocks()

        def on_step(step: int) -> None:
            nonlocal started
            if step % num_steps == 0:
                spent.append(spent_since(started))
                started = read_clocks()

        Trainer(replace(run, sinks=[*run.sinks, record])).train(on_step=on_step)
        rows = _rows_before(record.rows, run.training.steps)
    else:
        loop = build_other(name, settings, device=device, batches=batches, folder=folder)
        for _ in range(settings["pairs"] + 1):
            started = read_clocks()
            loop.run(num_steps)
            spent.append(spent_since(started))
        losses = loop.losses()
    peak = peak_gib()
    return {
        "spent": spent[1:],
        "rows": rows,
        "losses": losses,
        "memory": {"peak_gib": peak, "above_start_gib": peak - start},
        **_about(settings, device=device),
    }


def _import_peer(name: str) -> None:
    """Import before memory is counted, as the library is."""
    if name == TRAINER:
        import accelerate  # noqa: F401
    if name in (THEIRS, TRAINER):
        import transformers

        transformers.AutoModelForCausalLM  # noqa: B018  loads at the first look


def _rows_before(rows: Sequence[Row], step: int) -> list[Row]:
    return [row for row in rows if row["step"] < step]


def _about(settings: dict[str, Any], *, device: torch.device) -> dict[str, Any]:
    spec, architecture = find_model(_named(settings))
    counts = count(spec.build_meta(architecture))
    dtype = getattr(torch, settings["dtype"])
    peak = peak_flops(device, dtype=dtype) or PeakFlops(
        value=multiply(device, dtype=dtype, seconds=0.5), source="a timed matrix product"
    )
    return {
        "device": device_name(device),
        "device_type": device.type,
        "flops_per_token": counts.flops_per_token(settings["seq_len"]),
        "peak_flops": peak.value,
        "peak_source": peak.source,
    }


def check_losses(name: str, losses: Sequence[float], *, rows: Sequence[Row], dtype: str) -> float:
    """Return the largest gap between losses of all steps and those of the reported steps.

    Raises:
        DisagreementError: It is too large.
    """
    theirs = [losses[int(row["step"]) - 1] for row in rows]
    ours = [row["loss"] for row in rows]
    return check_close(f"losses of ours and {name}", ours, theirs, tolerance=TOLERANCES[dtype])


def peak_gib() -> float:
    """Return the most memory that this process has had; see the docstring of `train`."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
