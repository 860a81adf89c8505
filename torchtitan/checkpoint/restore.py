"""Load a checkpoint into a run.

Every name is accounted for. A parameter that the checkpoint or the model lacks is an error unless a
pattern of `checkpoint.exclude_from_loading` matches it, so that a renamed layer never keeps its
random initial weights unnoticed. A pattern is matched with names of parameters, e.g.
`output.weight`, and with `optimizer.output.weight`, their optimizer state. The state of an excluded
parameter is excluded too: it belongs to the weights that were dropped.

In mode "continue" other parameters may be trained than before (`optimizer.frozen_params`, LoRA).
A parameter that was frozen has no stored state and starts with a fresh one. The state of a
parameter that is frozen now is not read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError, DataError, Mistakes
from torchtitan.base.patterns import matches
from torchtitan.checkpoint.checksums import MANIFEST
from torchtitan.checkpoint.reader import read_tensors, stored_shapes
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.checkpoint.start import Start
from torchtitan.checkpoint.state import (
    COMPONENTS,
    STEP,
    RunState,
    model_tensors,
    optimizer_tensors,
    rng_tensors,
)
from torchtitan.mesh.ranks import union
from torchtitan.models.init import local_part
from torchtitan.models.interface import HasParameters
from torchtitan.optim.schedule import DECAYS, Schedule, build_schedule
from torchtitan.optim.settings import LRSchedulerConfig

logger = logging.getLogger(__name__)
KEY = "checkpoint.exclude_from_loading"
OPTIMIZER = "optimizer."
"""Prefix of a parameter's name: its optimizer state."""


def check_excluded(entries: Collection[str], *, model: HasParameters) -> None:
    """Check that each entry without a dot or wildcard is a component or a parameter of the model.

    Raises:
        ConfigError: Lists the other entries.
    """
    mistakes, parameters = Mistakes(), dict(model.named_parameters())
    for entry in entries:
        is_pattern = bool(set(entry.removeprefix(OPTIMIZER)) & set(".*?["))
        if not (entry in COMPONENTS or entry in parameters or is_pattern):
            mistakes.add(
                KEY,
                f"'{entry}' must be a component ({', '.join(COMPONENTS)}) or a pattern of "
                f'parameters, as "output.*"',
            )
    mistakes.report()


def restore(state: RunState, *, start: Start, group: dist.ProcessGroup) -> None:
    """Load into the run what `start` asks for. Everything else keeps its initial state.

    Raises:
        CheckpointError: The checkpoint lacks a component, or does not fit the run.
        DataError: The data position counts samples of other data.
    """
    source = start.source
    components = ("model",) if start.mode == "finetune" else COMPONENTS
    loaded = [name for name in components if name not in start.exclude]
    if isinstance(source, Checkpoint):
        stored = source.manifest["components"]
        if missing := [name for name in loaded if name not in stored]:
            raise CheckpointError(
                f"{source.path} has only {', '.join(map(str, stored))}, and lacks "
                f"{', '.join(missing)}; use a full checkpoint, or load only the weights: "
                f"checkpoint.initial_load_path with initial_load_model_only = true"
            )
    log_excluded(state, start, loaded=loaded, group=group)
    if "model" in loaded:
        weights = model_tensors(state.model)
        size = sum(local_part(tensor).nbytes for tensor in weights.values()) / 2**30
        logger.info("Reading weights from %s: %.2f GiB on this rank", source.path, size)
        source.read(weights)
    if start.mode != "finetune":
        assert isinstance(source, Checkpoint)
        if "optimizer" in loaded:
            _restore_optimizer(state, source, start)
        if "dataloader" in loaded:
            _restore_position(state, source, start)
        if "train_state" in loaded:
            _restore_train_state(state, source)
    if start.mode == "recover":
        logger.info("Resumed from %s", source.path)
        return
    verb = "Continued" if start.mode == "continue" else "Finetuning"
    parts = ", ".join(name for name in loaded if name != "lr_scheduler")  # only compared
    logger.info("%s at step %d from %s, loaded: %s", verb, state.progress.step, source.path, parts)
    if start.differences:
        logger.info("Settings that are new:\n  %s", "\n  ".join(start.differences))


def log_excluded(
    state: RunState, start: Start, *, loaded: Collection[str], group: dist.ProcessGroup | None
) -> None:
    """Log the parameters that each pattern excludes. Collective.

    Raises:
        CheckpointError: A pattern matches nothing.
    """
    patterns = [entry for entry in start.exclude if entry not in COMPONENTS]
    if not patterns:
        return
    names = set(union(dict.fromkeys(model_tensors(state.model)), group=group))
    if "model" in loaded:
        names |= start.source.shapes().keys()
    if "optimizer" in loaded:
        states = stored_shapes(start.source.path, "optimizer", group=group).keys() - {STEP}
        names |= {OPTIMIZER + _parameter(name) for name in states}
    for pattern in patterns:
        excluded = [name for name in sorted(names) if matches(name, [pattern])]
        if not excluded:
            raise CheckpointError(
                f"{KEY}: '{pattern}' must match a parameter of the model or the checkpoint, or "
                f"optimizer state that is loaded"
            )
        logger.info("Excluded by '%s': %s", pattern, _listed(excluded))


def _restore_optimizer(state: RunState, source: Checkpoint, start: Start) -> None:
    wanted, may_skip = optimizer_tensors(state.model, state.optimizer), set[str]()
    stored = set(stored_shapes(source.path, "optimizer", group=source.group))
    if start.mode == "continue":
        may_skip = skipped_optimizer_state(
            wanted, stored, state=state, exclude=start.exclude, group=source.group
        )
        wanted = {name: tensor for name, tensor in wanted.items() if name not in may_skip}
    counts = list[Tensor]()
    if STEP in stored:  # the count of all parameters
        counts = [t for name, t in wanted.items() if name.endswith(f".{STEP}")]
        wanted = {n: t for n, t in wanted.items() if not n.endswith(f".{STEP}")}
        wanted[STEP] = torch.zeros(())
    read_tensors(
        source.path,
        "optimizer",
        into=wanted,
        group=source.group,
        may_skip=may_skip.__contains__,
    )
    for count in counts:
        count.fill_(wanted[STEP])


def skipped_optimizer_state(
    wanted: Collection[str],
    stored: Collection[str],
    *,
    state: RunState,
    exclude: Collection[str],
    group: dist.ProcessGroup | None,
) -> set[str]:
    """Return the names of optimizer state that a continued run does not read. Collective.

    They belong to excluded parameters, to parameters that were frozen when the checkpoint was
    saved, or to parameters that are frozen now. The last two are logged.

    Args:
        wanted: Names of the optimizer state on this rank.
        stored: Names in the checkpoint.
        state: The run.
        exclude: Patterns of `checkpoint.exclude_from_loading`.
        group: Ranks that load together.
    """
    parameters = dict(state.model.named_parameters())
    is_trained = union({name: p.requires_grad for name, p in parameters.items()}, group=group)
    held, stored = {*union(dict.fromkeys(wanted), group=group)}, {*stored} - {STEP}
    before, now = set(map(_parameter, stored)), set(map(_parameter, held))
    excluded = {
        name
        for name in before | now
        if matches(name, exclude) or matches(OPTIMIZER + name, exclude)
    }
    # without any stored state, the optimizer was of a kind that has none
    fresh = now - before if before else set[str]()
    unread = {name for name in before - excluded if not is_trained.get(name, True)}
    for parts, change in ((fresh, "start with fresh optimizer state"), (unread, "are frozen now")):
        if parts:
            logger.info("Other parameters are trained than before: %s %s", _listed(parts), change)
    skipped = excluded | fresh | unread
    return {name for name in held | stored if _parameter(name) in skipped}


def _parameter(state_name: str) -> str:
    """`output.weight.exp_avg` -> `output.weight`"""
    return state_name.rpartition(".")[0]


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:8]) + (f" ... ({len(names)})" if len(names) > 8 else "")


def _restore_position(state: RunState, source: Checkpoint, start: Start) -> None:
    stored = source.state("dataloader", types={"position": int, "fingerprint": dict})
    stored.check_counts("position")
    try:
        state.loader.load_state_dict(stored)
    except DataError:
        # excluded at the first start; a restart loads this run's own position, unless the data
        # have changed again and it means nothing
        if "dataloader" not in start.already_excluded:
            raise
        logger.info("Excluded: dataloader, because the data differ")


def _restore_train_state(state: RunState, source: Checkpoint) -> None:
    types = {"step": int, "tokens_seen": int, "world_size": int}
    stored = source.state("train_state", types=types).check_counts("step", "tokens_seen")
    if (step := source.manifest["step"]) != stored["step"]:
        raise CheckpointError(
            f"{source.path} must hold one step, {MANIFEST} has {step} and train_state "
            f"{stored['step']}; use another checkpoint"
        )
    state.progress.step = step
    state.progress.tokens_seen = stored["tokens_seen"]
    names = stored_shapes(source.path, "train_state", group=source.group)
    generators = rng_tensors(rank=dist.get_rank())
    if stored["world_size"] != dist.get_world_size():
        generators = {}
        logger.info("The number of ranks differs: random generators start from debug.seed")
    if missing := generators.keys() - names:  # of a GPU, if saved on CPUs
        text = ", ".join(sorted(missing))
        logger.info("The checkpoint has no random generators %s: they start from debug.seed", text)
    wanted = {k: t for k, t in {**state.more, **generators}.items() if k in names}
    read_tensors(source.path, "train_state", into=wanted, group=source.group)
    set_rng({name: wanted[name] for name in generators if name in names})


def set_rng(states: Mapping[str, Tensor]) -> None:
    """Set this rank's random generators to `states`, all or some of `rng_tensors`."""
    setters = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
    for name, state in states.items():
        setters[name.rpartition(".")[2]](state)


def report_rate(state: RunState, *, start: Start) -> None:
    """Log the learning rate of the next step if it differs from the checkpoint's schedule."""
    if start.mode != "continue" or "lr_scheduler" in start.exclude:
        return
    source, step = start.source, state.progress.step + 1
    assert isinstance(source, Checkpoint)
    stored = source.state("lr_scheduler")
    decay = stored.get("decay_type")
    if decay not in [*DECAYS, state.lr_settings["decay_type"]]:  # code of another user
        return
    try:
        planned = _rebuild(stored)(step)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{source.path}/lr_scheduler is not a schedule: {error}; skip it: "
            f'{KEY} = ["lr_scheduler"]'
        ) from error
    rate = _rebuild(state.lr_settings)(step)
    if planned != rate:
        logger.info("Learning rate at step %d: %g -> %g", step, planned, rate)


def _rebuild(settings: Mapping[str, Any]) -> Schedule:
    values = dict(settings)
    peak_lr, training_steps = values.pop("peak_lr"), values.pop("training_steps")
    return build_schedule(
        LRSchedulerConfig(**values), peak_lr=peak_lr, training_steps=training_steps
    )
