"""The job that is planned: its settings, how it lies over ranks, and what it would run on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.config.sources import to_toml
from torchtitan.job import Config, load_config
from torchtitan.layout import find_layout
from torchtitan.parallel.layout import Layout
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.plan.devices import Device
from torchtitan.tools.plan.shorten import Shortened, fullest_ranks, shorten

BUDGET_IS_NOT_TRIED = (
    'activation_checkpoint.mode = "memory_budget" is not tried, for what the compiler chooses is '
    "not rehearsed: these settings replace it."
)
FEW = 4
"""Ranks of a pipeline that are all looked at."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job on so many devices."""

    config: Config
    layout: Layout
    device: Device
    gpus_per_node: int
    shortened: Shortened
    """What is rehearsed."""
    pipeline_ranks: Sequence[int]
    """Whose memory and work are looked at."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.layout.dims.world_size

    @property
    def is_compiled(self) -> bool:
        """Whether the job compiles its blocks; they are rehearsed without."""
        return self.config.compile.enable

    @property
    def has_budget(self) -> bool:
        """Whether the compiler chooses what to recompute; a rehearsal recomputes nothing."""
        return self.config.activation_checkpoint.mode == "memory_budget"

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        training = self.config.training
        return self.layout.samples_per_step(training) * training.seq_len

    @property
    def model_flops(self) -> float:
        """The FLOPs of a step by the convention of MFU, of all ranks."""
        seq_len = self.config.training.seq_len
        return float(self.layout.counts.flops_per_token(seq_len)) * self.tokens_per_step

    def first_ranks(self) -> list[int]:
        """Return of each of the pipeline ranks the first rank of the job."""
        return [rank * (self.world_size // self.layout.dims.pp) for rank in self.pipeline_ranks]

    def limits_of_recomputation(self) -> list[str]:
        """Say what a plan leaves to the compiler."""
        if not self.has_budget:
            return []
        budget = self.config.activation_checkpoint.memory_budget
        return [
            f'activation_checkpoint.mode = "memory_budget" ({budget:g}): what the compiler '
            "recomputes is not rehearsed. Memory is planned as if nothing were, so the job should "
            "need less; the time at worst is that of a second forward more."
        ]

    def headline(self) -> str:
        """Say what is planned in one line."""
        model, training = self.config.model, self.config.training
        accumulated = f", {self.layout.accumulation} times" if self.layout.accumulation > 1 else ""
        return (
            f"{model.name} {model.flavor} on {self.world_size} x {self.device.name}: "
            f"{self.layout.dims}; {training.local_batch_size} x {training.seq_len} tokens per rank"
            f"{accumulated}"
        )


def plan_job(
    argv: Sequence[str],
    *,
    world_size: int,
    device: Device,
    gpus_per_node: int,
    all_ranks: bool = False,
) -> Planned:
    """Read a job as the trainer would, and find how it lies over the ranks.

    `all_ranks`: look at every rank of a long pipeline, not at some alone.

    Raises:
        ConfigError: The settings, or the number of ranks, do not fit.
    """
    if world_size < 1 or gpus_per_node < 1:
        raise ConfigError(
            f"--world_size and --gpus_per_node must be at least 1, got {world_size} and "
            f"{gpus_per_node}"
        )
    return place(
        resolve_model(load_config(argv)),
        world_size=world_size,
        device=device,
        gpus_per_node=gpus_per_node,
        all_ranks=all_ranks,
    )


def place(
    config: Config, *, world_size: int, device: Device, gpus_per_node: int, all_ranks: bool
) -> Planned:
    """Find how a job lies over so many ranks.

    Raises:
        ConfigError: The rules do not allow it, or it cannot be rehearsed.
    """
    if config.optimizer.name == "Muon":
        raise ConfigError.at(
            "optimizer.name",
            "must not be Muon in a plan: its ranks tell each other at the start what they hold, "
            "and here there is one; plan with AdamW, which needs more memory",
        )
    layout = find_layout(config, world_size=world_size)
    return Planned(
        config=config,
        layout=layout,
        device=device,
        gpus_per_node=gpus_per_node,
        shortened=shorten(config, layout),
        pipeline_ranks=_pipeline_ranks(layout, all_ranks=all_ranks),
    )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A job for another process, to which settings go as a file alone."""

    file: Path
    settings: Sequence[str]
    """Options that come on top of the file."""
    world_size: int
    device: Device
    gpus_per_node: int

    def place(self) -> Planned:
        """Read the job there; what it says about its settings has been said already.

        Raises:
            ConfigError: The rules do not allow it.
        """
        logging.disable(logging.WARNING)
        return place(
            load_config([f"--job.config_file={self.file}", *self.settings]),
            world_size=self.world_size,
            device=self.device,
            gpus_per_node=self.gpus_per_node,
            all_ranks=False,
        )


def send(config: Config, planned: Planned, *, file: Path, settings: Sequence[str] = ()) -> Sent:
    """Write a job to a file, to be planned on as many devices as `planned`."""
    file.write_text(to_toml(config), encoding="utf-8")
    return Sent(
        file=file,
        settings=settings,
        world_size=planned.world_size,
        device=planned.device,
        gpus_per_node=planned.gpus_per_node,
    )


def _pipeline_ranks(layout: Layout, *, all_ranks: bool) -> list[int]:
    """Return the ranks to look at: of many those that may need most memory."""
    pp = layout.dims.pp
    if layout.pipeline is None or all_ranks or pp <= FEW:
        return list(range(pp))
    return fullest_ranks(layout.pipeline)
