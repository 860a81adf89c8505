"""The planned job: its settings, its layout over ranks, its device, and the step to rehearse.

Once a pipeline is full, each microbatch repeats the one before it. So does each accumulation step
after the second, which finds the gradients of the first. A rehearsal runs as few as reach the peak
of memory, and counts are multiplied: computation by the ratio of microbatches, communication that
happens once per pass of the pipeline by the ratio of passes.

Blocks are not compiled, and "auto" precision is bfloat16, as on each device of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.base.errors import ConfigError
from torchtitan.config.settings import PYTHON, flatten, parse, to_toml
from torchtitan.job import Config, load_config, load_job
from torchtitan.layout import find_layout
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.pipeline.layout import PipelineLayout
from torchtitan.parallel.pipeline.schedules import (
    Table,
    check_schedule,
    compute_table,
    count_microbatches,
)
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.plan.devices import Device
from torchtitan.tools.plan.schedule import peak_activations
from torchtitan.tools.plan.tape import Entry, Phase

OVERLAPPED = frozenset({"fsdp", "efsdp", "dp_replicate"})
"""Axes whose collectives overlap with computation. Computation waits for collectives of other
axes."""


@dataclass(frozen=True, kw_only=True)
class Shortened:
    """A job whose step has fewer microbatches."""

    config: Config
    layout: Layout
    microbatches: float
    """Microbatches of the full step, per rehearsed microbatch."""
    passes: float
    """Accumulation steps of the full step, per rehearsed one."""

    def times(self, entry: Entry, phase: Phase | None) -> float:
        """Return how many times the full step has an entry of the record."""
        if phase == "validation":
            return 0.0
        if phase in ("update", "state"):
            return 1.0
        is_once = phase in (None, "between") and entry.event == "message"
        if self.layout.pipeline is not None and is_once and entry.where[0] in OVERLAPPED:
            return self.passes
        return self.microbatches


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job on a number of devices."""

    config: Config
    layout: Layout
    device: Device
    gpus_per_node: int
    shortened: Shortened
    """The job that is rehearsed."""
    pipeline_ranks: Sequence[int]
    """Pipeline ranks whose memory and work are planned."""

    def __reduce__(self) -> Any:
        """Pickle the settings as TOML, because classes of custom models cannot be pickled."""
        toml = to_toml(self.config)
        return _load, (toml, self.world_size, self.device, self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.dims.world_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks."""
        training = self.config.training
        return self.layout.samples_per_step(training) * training.seq_len

    @property
    def model_flops(self) -> float:
        """FLOPs of a step over all ranks, by the convention of MFU."""
        seq_len = self.config.training.seq_len
        return float(self.layout.counts.flops_per_token(seq_len)) * self.tokens_per_step

    def first_ranks(self) -> list[int]:
        """Return the first global rank of each planned pipeline rank."""
        return [rank * (self.world_size // self.layout.dims.pp) for rank in self.pipeline_ranks]

    def headline(self) -> str:
        """Describe the planned job in one line."""
        model, training = self.config.model, self.config.training
        accumulated = f", {self.layout.accumulation} times" if self.layout.accumulation > 1 else ""
        return (
            f"{model.name} {model.flavor} on {self.world_size} x {self.device.name}: "
            f"{self.layout.dims}; {training.local_batch_size} x {training.seq_len} tokens per rank"
            f"{accumulated}"
        )


def plan_job(
    argv: Sequence[str], *, world_size: int, device: Device, gpus_per_node: int
) -> Planned:
    """Read a job as the trainer does, and find its layout; raise ConfigError if the settings do not
    fit together or the number of ranks."""
    config = resolve_model(load_config(argv))
    return plan_config(config, world_size=world_size, device=device, gpus_per_node=gpus_per_node)


def plan_config(config: Config, *, world_size: int, device: Device, gpus_per_node: int) -> Planned:
    """Find the layout of a job over a number of ranks; raise ConfigError if the rules forbid it, or
    it cannot be rehearsed."""
    if config.activation_checkpoint.mode == "memory_budget":
        raise ConfigError.at(
            "activation_checkpoint.mode",
            'must not be "memory_budget" in a plan, because the compiler chooses what it '
            'recomputes; plan with "none", which needs more memory',
        )
    if config.optimizer.name == "Muon":
        raise ConfigError.at(
            "optimizer.name",
            "must not be Muon in a plan, because Muon's ranks communicate before the first step; "
            "plan with AdamW, which needs more memory",
        )
    layout = find_layout(config, world_size=world_size)
    pipeline = layout.pipeline
    return Planned(
        config=config,
        layout=layout,
        device=device,
        gpus_per_node=gpus_per_node,
        shortened=_shorten(config, layout),
        pipeline_ranks=[0] if pipeline is None else _fullest_ranks(pipeline),
    )


def _load(toml: str, world_size: int, device: Device, gpus_per_node: int) -> Planned:
    layer = flatten(parse(toml, origin=PYTHON), origin=PYTHON, tree=Config)
    config = load_job(layer).config
    return plan_config(config, world_size=world_size, device=device, gpus_per_node=gpus_per_node)


def _shorten(config: Config, layout: Layout) -> Shortened:
    """Return the job with the fewest microbatches and accumulation steps that show a full step."""
    training = config.training
    if training.mixed_precision_param == "auto":
        training = replace(training, mixed_precision_param="bfloat16")
    config = replace(config, training=training, compile=replace(config.compile, enable=False))
    accumulation = min(layout.accumulation, 2)
    passes = layout.accumulation / accumulation
    layout = replace(layout, accumulation=accumulation)
    pipeline = layout.pipeline
    short_table = None if pipeline is None else _shorten_table(config, pipeline)
    if short_table is None or pipeline is None:
        return Shortened(config=config, layout=layout, microbatches=passes, passes=passes)
    num, full = count_microbatches(short_table), count_microbatches(pipeline.table)
    validation = replace(  # keeps all microbatches: a rank holds some memory of each
        config.validation,
        local_batch_size=config.validation.local_batch_size or training.local_batch_size,
    )
    training = replace(
        training, local_batch_size=num * pipeline.microbatch_size, global_batch_size=-1
    )
    return Shortened(
        config=replace(config, training=training, validation=validation),
        layout=replace(layout, pipeline=replace(pipeline, table=short_table)),
        microbatches=passes * full / num,
        passes=passes,
    )


def _shorten_table(config: Config, pipeline: PipelineLayout) -> Table | None:
    """Return the schedule with the fewest microbatches that fill it, or None if it has no more."""
    name = config.parallelism.pipeline_parallel_schedule
    pp, num = len(pipeline.table), count_microbatches(pipeline.table)
    stages_per_rank = len(pipeline.modules) // pp
    peaks, is_full = peak_activations(pipeline.table), False
    for fewer in range(max(1, max(peaks) // stages_per_rank), num):  # fewer cannot fill it
        sizes = {"pp": pp, "stages_per_rank": stages_per_rank, "num_microbatches": fewer}
        try:
            check_schedule(name, **sizes)
        except ConfigError:
            continue
        table = compute_table(name, **sizes)
        if is_full:  # the last microbatch finds what the first ones have left
            return table
        is_full = peak_activations(table) == peaks
    return None


def _fullest_ranks(pipeline: PipelineLayout) -> list[int]:
    """Return the first and the last rank, and the one whose modules hold most activations."""
    sizes = [len(modules) for modules in pipeline.modules]
    held = peak_activations(pipeline.table, sizes=sizes)
    return sorted({0, held.index(max(held)), len(held) - 1})
