"""Rules that tie several settings together, as far as the file alone can tell.

Each names the keys it ties, so that the message can point at the file that gave them, and so that a
rule stays silent while one of its keys is wrong in itself. What needs the number of ranks or the
model's sizes is checked at assembly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict

from torchtitan.config.block_rules import block_rules
from torchtitan.config.broken import Broken, leads_outside
from torchtitan.config.checkpoint_rules import checkpoint_rules
from torchtitan.config.data_rules import data_rules
from torchtitan.config.float8_rules import float8_rules
from torchtitan.config.layout_rules import layout_rules
from torchtitan.config.lora_rules import lora_rules
from torchtitan.config.validation_rules import validation_rules
from torchtitan.job import Config
from torchtitan.models.settings import NEEDED, READ


def broken_rules(config: Config) -> Iterator[Broken]:
    """Check every rule."""
    yield from _job(config)
    yield from _profiling(config)
    yield from _rope(config)
    yield from data_rules(config)
    yield from _optimization(config)
    yield from lora_rules(config)
    yield from layout_rules(config)
    yield from block_rules(config)
    yield from float8_rules(config)
    yield from checkpoint_rules(config)
    yield from validation_rules(config)
    yield from _debug(config)


def _job(config: Config) -> Iterator[Broken]:
    name = config.job.save_config_file
    if name is not None and (leads_outside(name) or os.path.normpath(name) == "."):
        yield Broken(
            ("job.save_config_file",),
            f'must be a file inside dump_folder, got "{name}"; write a name alone, as "job.toml"',
        )


def _profiling(config: Config) -> Iterator[Broken]:
    profiling = config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        keys = ("profile_freq", "profiler_warmup", "profiler_active", "enable_profiling")
        yield Broken(
            tuple(f"profiling.{key}" for key in keys),
            f"must be at least profiler_warmup + profiler_active ({profiling.profiler_warmup} + "
            f"{profiling.profiler_active}), got {profiling.profile_freq}; try {needed}",
        )


def _rope(config: Config) -> Iterator[Broken]:
    scaling = config.model.rope_scaling
    section = "model.rope_scaling"
    reads = ", ".join(READ[scaling.type]) or "nothing else"
    for key, value in asdict(scaling).items():
        if key in NEEDED[scaling.type] and value is None:
            yield Broken((f"{section}.type", f"{section}.{key}"), f"needs {key}; it reads {reads}")
        elif key != "type" and key not in READ[scaling.type] and value is not None:
            readers = " or ".join(f'"{name}"' for name, keys in READ.items() if key in keys)
            yield Broken(
                (f"{section}.{key}", f"{section}.type"),
                f'is not read by type = "{scaling.type}", which reads {reads}; remove it, or write '
                f"type = {readers}",
            )


def _optimization(config: Config) -> Iterator[Broken]:
    optimizer, schedule = config.optimizer, config.lr_scheduler
    if optimizer.momentum and optimizer.name != "SGD":
        yield Broken(
            ("optimizer.momentum", "optimizer.name"),
            f'is read by SGD alone, got name = "{optimizer.name}"; use beta1 or remove this',
        )
    yield from _warmup(config)
    total, decays_to_zero = schedule.total_steps, schedule.min_lr_factor == 0
    decays = schedule.decay_ratio is None or schedule.decay_ratio > 0
    if total is not None and total < config.training.steps and decays and decays_to_zero:
        yield Broken(
            ("lr_scheduler.total_steps", "training.steps", "lr_scheduler.min_lr_factor"),
            f"must be at least training.steps ({config.training.steps}), got {total}: the learning "
            "rate would be 0 from there on; raise it, or set min_lr_factor",
        )


def _warmup(config: Config) -> Iterator[Broken]:
    schedule, steps = config.lr_scheduler, config.training.steps
    keys = ("lr_scheduler.warmup_ratio", "lr_scheduler.warmup_steps", "training.steps")
    if schedule.warmup_steps is not None and schedule.warmup_ratio is not None:
        yield Broken(
            keys[:2],
            f"is another way to say warmup_steps, which is {schedule.warmup_steps}; remove one",
        )
        return
    num_warmup = schedule.num_warmup_steps(schedule.total_steps or steps)
    if num_warmup > steps:
        peak = config.optimizer.lr
        yield Broken(
            keys,
            f"the warmup takes {num_warmup} steps and the run {steps}, so the learning rate ends "
            f"at {peak * steps / num_warmup:.3g} and never reaches optimizer.lr = {peak:g}; lower "
            f"warmup_steps, or write warmup_ratio = 0.1",
            is_notice=True,
        )


def _debug(config: Config) -> Iterator[Broken]:
    if config.debug.deterministic_warn_only and not config.debug.deterministic:
        yield Broken(
            ("debug.deterministic_warn_only", "debug.deterministic"),
            "has no effect: it needs debug.deterministic = true",
            is_notice=True,
        )
