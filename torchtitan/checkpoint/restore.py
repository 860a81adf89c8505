"""From a checkpoint into a run: whole, or the parts that were asked for.

Every name is accounted for. A parameter that the checkpoint lacks, or that the model lacks, is an
error unless a pattern of `exclude_from_loading` covers it, so that a renamed layer never stays at
its random initial weights unseen. A pattern stands for a parameter with its optimizer state.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError, DataError
from torchtitan.base.log import amount
from torchtitan.base.own import is_import_path, is_trusted
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.files import check_counts
from torchtitan.checkpoint.folders import MANIFEST
from torchtitan.checkpoint.ranks import union
from torchtitan.checkpoint.source import Selection, Step
from torchtitan.checkpoint.start import Intention, Start
from torchtitan.checkpoint.state import (
    COMPONENTS,
    RunState,
    model_tensors,
    optimizer_tensors,
    rng_tensors,
    set_rng,
)
from torchtitan.optim.schedule import Schedule, build_schedule
from torchtitan.optim.settings import LRSchedulerConfig

logger = logging.getLogger(__name__)
TAKEN: Mapping[Intention, tuple[str, ...]] = {
    "recover": COMPONENTS,
    "continue": COMPONENTS,
    "finetune": ("model",),
}
NUM_SHOWN_STEPS = 5


def restore(state: RunState, *, start: Start, group: dist.ProcessGroup) -> None:
    """Load into the run what `start` asks for; what is left out keeps its fresh state.

    Raises:
        CheckpointError: The checkpoint lacks a component, or does not fit the run.
        DataError: The data position counts in other data.
    """
    source = start.source
    taken = [name for name in TAKEN[start.intention] if name not in start.exclude]
    if isinstance(source, Step):
        _check_components(source, taken)
    _report_left_out(state, start, taken=taken, group=group)
    if "model" in taken:
        source.read(model_tensors(state.model))
    if start.intention != "finetune":
        assert isinstance(source, Step)
        _restore_rest(state, source, start, taken=taken)
    _report(start, taken=taken, step=state.progress.step)


def _check_components(step: Step, taken: Collection[str]) -> None:
    components = step.manifest["components"]
    if missing := [name for name in taken if name not in components]:
        there = ", ".join(map(str, components)) or "nothing"
        raise CheckpointError(
            f"{step.path} lacks {', '.join(missing)}, it holds {there} alone; take a full "
            f"checkpoint, or only the weights of this one: "
            f"checkpoint.initial_load_path with initial_load_model_only = true"
        )


def _report_left_out(
    state: RunState, start: Start, *, taken: Collection[str], group: dist.ProcessGroup
) -> None:
    """Log which parameters each pattern leaves out, of the model or of the source."""
    patterns = [entry for entry in start.exclude if entry not in COMPONENTS]
    if not patterns:
        return
    names = set(union(dict.fromkeys(model_tensors(state.model)), group=group))
    if "model" in taken:
        names.update(start.source.names())
    if "optimizer" in taken:
        stored = storage.stored_names(start.source.path, "optimizer", group=group)
        names.update(name.rpartition(".")[0] for name in stored)
    for pattern in patterns:
        left_out = sorted(name for name in names if fnmatchcase(name, pattern))
        if not left_out:
            raise CheckpointError(
                f"checkpoint.exclude_from_loading '{pattern}' is neither a component "
                f"({', '.join(COMPONENTS)}) nor does it match a parameter of this model or of "
                f"the checkpoint; correct or remove it"
            )
        shown = ", ".join(left_out[:8]) + (" ..." if len(left_out) > 8 else "")
        count = amount(len(left_out), "parameter")
        logger.info("Not loaded, as '%s' asks: %s: %s", pattern, count, shown)


def _restore_rest(state: RunState, step: Step, start: Start, *, taken: Collection[str]) -> None:
    """Load what lies beside the weights in a step of ours."""
    if "optimizer" in taken:
        patterns = Selection(exclude=start.exclude)

        def leaves_out(name: str) -> bool:
            return patterns.leaves_out(name.rpartition(".")[0])

        tensors = optimizer_tensors(state.model, state.optimizer)
        wanted = {name: tensor for name, tensor in tensors.items() if not leaves_out(name)}
        storage.read_tensors(
            step.path, "optimizer", into=wanted, group=step.group, leaves_out=leaves_out
        )
    if "dataloader" in taken:
        _restore_position(state, step, start)
    if "train_state" in taken:
        _restore_train_state(state, step)


def _restore_position(state: RunState, step: Step, start: Start) -> None:
    stored = step.state("dataloader", kinds={"position": int, "fingerprint": dict})
    check_counts(stored, "position")
    try:
        state.loader.load_state_dict(stored)
    except DataError:
        # left out once is not left out at each restart, but in other data there is no other way
        if "dataloader" not in start.left_out_before:
            raise
        logger.info("Not loaded, as these are other data: dataloader")


def _restore_train_state(state: RunState, step: Step) -> None:
    kinds = {"step": int, "tokens_seen": int, "world_size": int}
    stored = step.state("train_state", kinds=kinds)
    check_counts(stored, "step", "tokens_seen")
    if (number := step.manifest["step"]) != stored["step"]:
        raise CheckpointError(
            f"{step.path} must hold one step, its {MANIFEST} says {number} and its train_state "
            f"{stored['step']}; use another checkpoint"
        )
    state.progress.step = number
    state.progress.tokens_seen = stored["tokens_seen"]
    there = storage.stored_names(step.path, "train_state", group=step.group)
    more = {name: tensor for name, tensor in state.more.items() if name in there}
    storage.read_tensors(step.path, "train_state", into=more, group=step.group)
    if stored["world_size"] != dist.get_world_size():
        logger.info("Another number of ranks: random generators start from debug.seed")
        return
    ours = rng_tensors(rank=dist.get_rank())
    if lacking := [name for name in ours if name not in there]:  # a GPU's, if saved on CPUs
        logger.info(
            "The checkpoint holds no random generators %s: they start from debug.seed",
            ", ".join(lacking),
        )
    states = {name: tensor for name, tensor in ours.items() if name in there}
    storage.read_tensors(step.path, "train_state", into=states, group=step.group)
    set_rng(states)


def _report(start: Start, *, taken: Collection[str], step: int) -> None:
    if start.intention == "recover":
        logger.info("Resumed from %s", start.source.path)
        return
    verb = "Continued" if start.intention == "continue" else "Finetuning"
    logger.info(
        "%s at step %d from %s, loaded: %s", verb, step, start.source.path, ", ".join(taken)
    )
    if start.differences:
        logger.info("Settings that are new:\n  %s", "\n  ".join(start.differences))


def report_schedule(state: RunState, *, start: Start) -> None:
    """Log the learning rate from now on where it is not as it was planned, and warn if it stays far
    under optimizer.lr."""
    if start.intention == "finetune":
        return
    source, new, step = start.source, state.lr_settings, state.progress.step
    assert isinstance(source, Step)
    is_planned = False
    if "lr_scheduler" not in start.exclude:
        old = source.state("lr_scheduler", kinds={"training_steps": int})
        rates, decay = [], old.get("decay_type")
        # of the user's own, and this job names another
        is_known = not is_import_path(decay) or is_trusted(decay)
        if start.intention == "continue" and old != new and is_known:
            rates = _compare_schedules(source.path, old, new, step=step)
        if rates:
            rows = [f"{at:>10} {before:>12.6g} {now:>12.6g}" for at, before, now in rates]
            head = f"{'step':>10} {'old lr':>12} {'new lr':>12}"
            logger.info("The learning rate is planned anew:\n%s", "\n".join([head, *rows]))
        is_planned = is_known and not rates and new["training_steps"] <= old["training_steps"]
    if not is_planned and (warning := describe_low_rate(new, step=step)):
        logger.warning(warning)


def describe_low_rate(settings: Mapping[str, Any], *, step: int) -> str:
    """Say so if the learning rate of the steps after `step` never gets near its peak, and how it
    would; nothing if it does, or only warms up."""
    lr, last, peak = _rebuild(settings), settings["training_steps"], settings["peak_lr"]
    total = settings["total_steps"] or last
    first, length = step + 1, max(total, last)
    highest = max((lr(at) for at in range(first, last + 1)), default=peak)
    is_warmup = lr(last + 1) > lr(last)  # of which the settings' own notice speaks
    if highest >= peak / 2 or is_warmup:
        return ""
    pinned = f"lr_scheduler.total_steps = {length} and " if total < length else ""
    return (
        f"optimizer.lr is {peak:g}, and the learning rate of steps {first} to {last} is at most "
        f"{highest:.3g}: the schedule counts from step 1. To decay from optimizer.lr over these "
        f"steps write {pinned}lr_scheduler.decay_ratio = {(length - step) / length:.6g}"
    )


def _compare_schedules(
    source: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, step: int
) -> list[tuple[int, float, float]]:
    try:
        return schedule_table(old, new, step=step)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{source}/lr_scheduler holds no schedule: {error}; leave it out: "
            f'checkpoint.exclude_from_loading = ["lr_scheduler"]'
        ) from error


def schedule_table(
    old: Mapping[str, Any], new: Mapping[str, Any], *, step: int
) -> list[tuple[int, float, float]]:
    """Return (step, old rate, new rate) of the step after `step` and of some up to the end.

    Nothing where all rates up to the end are the same.
    """
    old_lr, new_lr = _rebuild(old), _rebuild(new)
    first = step + 1
    end = max(first, new["total_steps"] or new["training_steps"])
    if all(old_lr(at) == new_lr(at) for at in range(first, end + 1)):
        return []
    steps = {first + (end - first) * i // (NUM_SHOWN_STEPS - 1) for i in range(NUM_SHOWN_STEPS)}
    return [(at, old_lr(at), new_lr(at)) for at in sorted(steps)]


def _rebuild(stored: Mapping[str, Any]) -> Schedule:
    settings = {"decay_end": "last_step", **stored}  # which versions without the setting did
    peak_lr, training_steps = settings.pop("peak_lr"), settings.pop("training_steps")
    return build_schedule(
        LRSchedulerConfig(**settings), peak_lr=peak_lr, training_steps=training_steps
    )
