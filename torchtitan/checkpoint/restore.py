"""Load a checkpoint into a run.

Every name is accounted for. A parameter that the checkpoint or the model lacks is an error unless a
pattern of `exclude_from_loading` matches it, so that a renamed layer never keeps its random initial
weights unnoticed. `partial.py` has the exceptions.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.custom import is_import_path, is_trusted
from torchtitan.base.errors import CheckpointError, DataError
from torchtitan.checkpoint.checksums import MANIFEST
from torchtitan.checkpoint.load import read_tensors, stored_shapes
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
from torchtitan.models.init import local_part
from torchtitan.optim.schedule import Schedule, build_schedule
from torchtitan.optim.settings import LRSchedulerConfig

logger = logging.getLogger(__name__)


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
        _check_components(source, loaded)
    if start.exclude:
        from torchtitan.checkpoint.partial import log_excluded

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
    _log_start(start, loaded=loaded, step=state.progress.step)


def _check_components(source: Checkpoint, loaded: Collection[str]) -> None:
    stored = source.manifest["components"]
    if missing := [name for name in loaded if name not in stored]:
        raise CheckpointError(
            f"{source.path} lacks {', '.join(missing)}, it has only "
            f"{', '.join(map(str, stored)) or 'nothing'}; use a full checkpoint, or load only the "
            f"weights: checkpoint.initial_load_path with initial_load_model_only = true"
        )


def _restore_optimizer(state: RunState, source: Checkpoint, start: Start) -> None:
    wanted, may_skip = optimizer_tensors(state.model, state.optimizer), set[str]()
    if start.mode == "continue":
        from torchtitan.checkpoint.partial import skipped_optimizer_state

        may_skip = skipped_optimizer_state(wanted, state=state, start=start, group=source.group)
        wanted = {name: tensor for name, tensor in wanted.items() if name not in may_skip}
    counts = list[Tensor]()
    if STEP in stored_shapes(source.path, "optimizer", group=source.group):
        counts = [t for name, t in wanted.items() if name.endswith(f".{STEP}")]
        wanted = {n: t for n, t in wanted.items() if not n.endswith(f".{STEP}")}
        wanted[STEP] = torch.zeros(())
    read_tensors(
        source.path,
        "optimizer",
        into=wanted,
        group=source.group,
        may_skip=may_skip.__contains__,
        remedy="restore [optimizer], or start with fresh state: checkpoint.exclude_from_loading = "
        '["optimizer.output.*"] for some parameters, or ["optimizer"]',
    )
    for count in counts:
        count.fill_(wanted[STEP])


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
    """Set this rank's random generators to `states`, all or some of those of `rng_tensors`."""
    setters = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
    for name, state in states.items():
        setters[name.rpartition(".")[2]](state)


def _log_start(start: Start, *, loaded: Collection[str], step: int) -> None:
    if start.mode == "recover":
        logger.info("Resumed from %s", start.source.path)
        return
    verb = "Continued" if start.mode == "continue" else "Finetuning"
    parts = ", ".join(name for name in loaded if name != "lr_scheduler")  # only compared
    logger.info("%s at step %d from %s, loaded: %s", verb, step, start.source.path, parts)
    if start.differences:
        logger.info("Settings that are new:\n  %s", "\n  ".join(start.differences))


def report_rate(state: RunState, *, start: Start) -> None:
    """Log the learning rate of the next step if it differs from the checkpoint's schedule.

    Warn if it is below half of `optimizer.lr` and does not rise, unless that was planned.
    """
    if start.mode == "finetune":
        return
    source, new, step = start.source, state.lr_settings, state.progress.step + 1
    assert isinstance(source, Checkpoint)
    schedule = _rebuild(new)
    last, total = new["training_steps"], new["total_steps"] or new["training_steps"]
    rate, peak, is_as_planned = schedule(step), new["peak_lr"], False
    if "lr_scheduler" not in start.exclude:
        old = source.state("lr_scheduler", types={"training_steps": int})
        decay = old.get("decay_type")
        is_known = not is_import_path(decay) or is_trusted(decay)  # else code of another user
        planned = rate
        if start.mode == "continue" and is_known:
            planned = _planned_rate(source.path, old, step=step)
        if planned != rate:
            logger.info("Learning rate at step %d: %g -> %g", step, planned, rate)
        exceeds_plan = last > old["training_steps"] and (not new["total_steps"] or last > total)
        is_as_planned = is_known and planned == rate and not exceeds_plan
    if step <= last and rate < peak / 2 and schedule(step + 1) <= rate and not is_as_planned:
        length = max(total, last)
        pinned = f"lr_scheduler.total_steps = {length} and " if total < length else ""
        logger.warning(
            f"optimizer.lr is {peak:g}, but the schedule counts from step 1 and gives step {step} "
            f"{rate:.3g}. To decay from optimizer.lr over steps {step} to {last}, write {pinned}"
            f"lr_scheduler.decay_ratio = {(length - step + 1) / length:.6g}"
        )


def _planned_rate(source: Path, stored: Mapping[str, Any], *, step: int) -> float:
    try:
        return _rebuild(stored)(step)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{source}/lr_scheduler is not a schedule: {error}; skip it: "
            f'checkpoint.exclude_from_loading = ["lr_scheduler"]'
        ) from error


def _rebuild(stored: Mapping[str, Any]) -> Schedule:
    settings = {"decay_end": "last_step", **stored}  # versions without the setting did this
    peak_lr, training_steps = settings.pop("peak_lr"), settings.pop("training_steps")
    return build_schedule(
        LRSchedulerConfig(**settings), peak_lr=peak_lr, training_steps=training_steps
    )
