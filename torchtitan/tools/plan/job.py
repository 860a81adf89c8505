"""The planned job: its settings, its layout over ranks, and its device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchtitan.base.errors import ConfigError
from torchtitan.config.settings import PYTHON, flatten, parse, to_toml
from torchtitan.job import Config, load_config, load_job
from torchtitan.layout import find_layout
from torchtitan.parallel.layout import Layout
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.plan.devices import Device
from torchtitan.tools.plan.shorten import Shortened, fullest_ranks, shorten

FEW = 4
"""Pipelines of at most this number of ranks are planned with all of them."""


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

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.dims.world_size

    @property
    def is_compiled(self) -> bool:
        """Whether the job compiles its blocks. A rehearsal does not."""
        return self.config.compile.enable

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
    argv: Sequence[str],
    *,
    world_size: int,
    device: Device,
    gpus_per_node: int,
) -> Planned:
    """Read a job as the trainer does, and find its layout; raise ConfigError if the settings do not
    fit together or the number of ranks."""
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
    )


def place(
    config: Config,
    *,
    world_size: int,
    device: Device,
    gpus_per_node: int,
) -> Planned:
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
    pipeline, pp = layout.pipeline, layout.dims.pp
    return Planned(
        config=config,
        layout=layout,
        device=device,
        gpus_per_node=gpus_per_node,
        shortened=shorten(config, layout),
        pipeline_ranks=range(pp) if pipeline is None or pp <= FEW else fullest_ranks(pipeline),
    )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A job for another process. The settings are TOML, since custom sections cannot be pickled."""

    toml: str
    settings: Mapping[str, object] = field(default_factory=dict)
    """Values by key that override the TOML."""
    world_size: int
    device: Device
    gpus_per_node: int

    def place(self) -> Planned:
        """Find the layout, without repeating the warnings about settings; raise ConfigError if the
        rules forbid it."""
        logging.disable(logging.WARNING)
        layer = flatten(parse(self.toml, origin=PYTHON), origin=PYTHON, tree=Config)
        for key, value in self.settings.items():
            *section, name = key.split(".")
            layer |= flatten({name: value}, origin=PYTHON, tree=Config, prefix=tuple(section))
        return place(
            load_job(layer).config,
            world_size=self.world_size,
            device=self.device,
            gpus_per_node=self.gpus_per_node,
        )


def send(
    config: Config,
    planned: Planned,
    *,
    settings: Mapping[str, object] | None = None,
    world_size: int | None = None,
) -> Sent:
    """Return a job for another process, on the devices of `planned` unless `world_size` is set."""
    return Sent(
        toml=to_toml(config),
        settings=settings or {},
        world_size=world_size or planned.world_size,
        device=planned.device,
        gpus_per_node=planned.gpus_per_node,
    )
