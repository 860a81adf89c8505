"""From a checkpoint into a run: whole, or the parts that were asked for.

Every name is accounted for. A parameter that the checkpoint lacks, or that the model lacks, is an
error unless a pattern of `exclude_from_loading` covers it, so that a renamed layer never stays at
its random initial weights unseen. A pattern stands for a parameter with its optimizer state.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError, DataError
from torchtitan.base.log import amount
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.files import check_counts, checked_kinds
from torchtitan.checkpoint.hf_folder import EMBEDDING, OUTPUT, HFFolder
from torchtitan.checkpoint.hf_read import read_weights
from torchtitan.checkpoint.ranks import on_every_rank, union
from torchtitan.checkpoint.staging import local_part
from torchtitan.checkpoint.start import Intention, Start
from torchtitan.checkpoint.state import (
    RunState,
    model_tensors,
    optimizer_tensors,
    rng_tensors,
    set_rng,
)
from torchtitan.models.lora import is_factor
from torchtitan.optim.schedule import Schedule, build_schedule
from torchtitan.optim.settings import LRSchedulerConfig

logger = logging.getLogger(__name__)
COMPONENTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
TAKEN: Mapping[Intention, tuple[str, ...]] = {
    "recover": COMPONENTS,
    "continue": COMPONENTS,
    "finetune": ("model",),
}
NUM_SHOWN_STEPS = 5
VOCABULARY = (EMBEDDING, OUTPUT)


class Patterns:
    """Shell patterns of parameter names that are not loaded, and what each of them left out."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._left_out: dict[str, set[str]] = {pattern: set() for pattern in patterns}

    def match(self, parameter: str) -> bool:
        """Tell whether a pattern stands for this parameter, and remember that it did."""
        hits = [pattern for pattern in self._left_out if fnmatchcase(parameter, pattern)]
        for pattern in hits:
            self._left_out[pattern].add(parameter)
        return bool(hits)

    def match_state(self, name: str) -> bool:
        """Tell it of a parameter's optimizer state, `<parameter>.<state>`."""
        return self.match(name.rpartition(".")[0])

    def report(self, *, group: dist.ProcessGroup) -> None:
        """Log what was left out on any rank: each matches the parameters that it holds.

        Raises:
            CheckpointError: A pattern stands for nothing.
        """
        own = {(pattern, n): None for pattern, names in self._left_out.items() for n in names}
        for pattern, name in union(own, group=group):
            self._left_out[pattern].add(name)
        for pattern, names in self._left_out.items():
            if not names:
                raise CheckpointError(
                    f"checkpoint.exclude_from_loading '{pattern}' is neither a component "
                    f"({', '.join(COMPONENTS)}) nor does it match a parameter of this model or of "
                    f"the checkpoint; correct or remove it"
                )
            shown = ", ".join(sorted(names)[:8]) + (" ..." if len(names) > 8 else "")
            count = amount(len(names), "parameter")
            logger.info("Not loaded, as '%s' asks: %s: %s", pattern, count, shown)


def restore(state: RunState, *, start: Start, group: dist.ProcessGroup) -> None:
    """Load into the run what `start` says; what is left out keeps its fresh state.

    Raises:
        CheckpointError: The checkpoint lacks a component, or does not fit the run.
        DataError: The data position counts in other data.
    """
    source = start.source
    taken = [name for name in TAKEN[start.intention] if name not in start.exclude]
    patterns = Patterns(entry for entry in start.exclude if entry not in COMPONENTS)
    if start.hf is not None:
        _restore_hf(state, start.hf, patterns=patterns, group=group)
        return
    if start.is_plain:
        _restore_plain(state, start, patterns=patterns, group=group)
        return
    manifest = storage.on_first_rank(lambda: storage.read_manifest(source), group=group)
    missing = [name for name in taken if name not in manifest["components"]]
    there = ", ".join(map(str, manifest["components"])) or "nothing"
    if missing:
        raise CheckpointError(
            f"{source} lacks {', '.join(missing)}, it holds {there} alone; take a full checkpoint, "
            f"or only the weights of this one: "
            f"checkpoint.initial_load_path with initial_load_model_only = true"
        )
    if "model" in taken:
        tensors = model_tensors(state.model)
        wanted = {name: t for name, t in tensors.items() if not patterns.match(name)}
        if start.intention == "finetune":
            stored = storage.stored_names(source, "model", group=group)
            wanted = without_new_factors(wanted, stored)
        storage.read_tensors(
            source,
            "model",
            into=wanted,
            group=group,
            leaves_out=patterns.match,
            may_grow=VOCABULARY if start.grows_vocab else (),
        )
    if "optimizer" in taken:
        tensors = optimizer_tensors(state.model, state.optimizer)
        wanted = {name: t for name, t in tensors.items() if not patterns.match_state(name)}
        storage.read_tensors(
            source, "optimizer", into=wanted, group=group, leaves_out=patterns.match_state
        )
    if "dataloader" in taken:
        _restore_position(state, start, group=group)
    if "train_state" in taken:
        _restore_train_state(state, source, step=manifest["step"], group=group)
    if start.intention == "continue" and "lr_scheduler" in taken:
        old = storage.on_first_rank(lambda: storage.read_state(source, "lr_scheduler"), group=group)
        _report_schedule(source, old, state.schedule, step=state.progress.step)
    patterns.report(group=group)
    _report(start, taken=taken, step=manifest["step"])


def without_new_factors(wanted: dict[str, Tensor], stored: Collection[str]) -> dict[str, Tensor]:
    """Leave out low-rank factors where the weights at hand have none: they begin with this run."""
    if any(map(is_factor, stored)):
        return wanted
    return {name: t for name, t in wanted.items() if not is_factor(name)}


def _restore_plain(
    state: RunState, start: Start, *, patterns: Patterns, group: dist.ProcessGroup
) -> None:
    """Load the weights from a DCP folder of another writer, where other things may lie beside.

    torchtitan 0.2 writes one folder a step: parameters by their names, all else below the name of
    its component, much of it as pickles, which are never read.
    """
    folder = start.source
    tensors = storage.stored_names(folder.parent, folder.name, group=group)
    beside: set[str] = set()

    def leaves_out(name: str) -> bool:
        if patterns.match(name):
            return True
        if name in tensors and name.partition(".")[0] not in COMPONENTS[1:]:
            return False
        beside.add(name)
        return True

    parameters = model_tensors(state.model)
    wanted = {name: t for name, t in parameters.items() if not patterns.match(name)}
    wanted = without_new_factors(wanted, tensors)
    is_tied = OUTPUT not in union(dict.fromkeys(parameters), group=group)
    has_copy = is_tied and OUTPUT in tensors and not patterns.match(OUTPUT)
    storage.read_tensors(
        folder.parent,
        folder.name,
        into=wanted,
        group=group,
        leaves_out=lambda name: leaves_out(name) or (has_copy and name == OUTPUT),
        may_grow=VOCABULARY if start.grows_vocab else (),
        in_halves=start.in_halves,
    )
    if has_copy:
        _check_tied(folder, wanted.get(EMBEDDING), grows_vocab=start.grows_vocab, group=group)
    patterns.report(group=group)
    logger.info("Finetuning at step 0 from %s, of another writer, loaded: model", folder)
    if beside:
        shown = ", ".join(sorted(beside)[:8]) + (" ..." if len(beside) > 8 else "")
        logger.info("Not read, as no parameters: %d entries: %s", len(beside), shown)


def _check_tied(
    folder: Path, embedding: Tensor | None, *, grows_vocab: bool, group: dist.ProcessGroup
) -> None:
    """Compare the head that a tied model was saved with beside its embedding, each rank the shard
    that it holds.

    Raises:
        CheckpointError: They differ, or the embedding was not loaded: the head would be lost.
    """
    # filled with the rows that are stored: those behind them are the embedding's own
    head = {} if embedding is None else {OUTPUT: embedding.clone()}
    storage.read_tensors(
        folder.parent,
        folder.name,
        into=head,
        group=group,
        may_grow=(OUTPUT,) if grows_vocab else (),
    )
    same = embedding is None or torch.equal(local_part(embedding), local_part(head[OUTPUT]))
    found = on_every_rank(lambda: (embedding is not None, same), group=group)
    if not (any(held for held, _ in found) and all(equal for _, equal in found)):
        raise CheckpointError(
            f"{folder} must hold the same in {OUTPUT} as in {EMBEDDING}, since this model ties "
            f"them, got others; take a model.flavor that is not tied, or leave the head out: "
            f'checkpoint.exclude_from_loading = ["{OUTPUT}"]'
        )
    logger.info("%s is %s, to which this model ties it: not read twice", OUTPUT, EMBEDDING)


def _restore_hf(
    state: RunState, folder: HFFolder, *, patterns: Patterns, group: dist.ProcessGroup
) -> None:
    """Load the weights from a folder of Hugging Face, whose names were accounted for before."""
    for name in folder.tensors:  # a pattern may stand for what is in the folder alone
        patterns.match(name)
    parameters = model_tensors(state.model)
    wanted = {name: t for name, t in parameters.items() if not patterns.match(name)}
    read_weights(folder, into=without_new_factors(wanted, folder.tensors), group=group)
    patterns.report(group=group)
    logger.info("Finetuning at step 0 from %s, loaded: model", folder.path)


def _restore_position(state: RunState, start: Start, *, group: dist.ProcessGroup) -> None:
    stored = storage.on_first_rank(
        lambda: checked_kinds(
            storage.read_state(start.source, "dataloader"),
            kinds={"position": int, "fingerprint": dict},
        ),
        group=group,
    )
    check_counts(stored, "position")
    try:
        state.loader.load_state_dict(stored)
    except DataError:
        # left out once is not left out at each restart, but in other data there is no other way
        if "dataloader" not in start.left_out_before:
            raise
        logger.info("Not loaded, as these are other data: dataloader")


def _restore_train_state(
    state: RunState, source: Path, *, step: int, group: dist.ProcessGroup
) -> None:
    kinds = {"step": int, "tokens_seen": int, "world_size": int}
    train_state = storage.on_first_rank(
        lambda: checked_kinds(storage.read_state(source, "train_state"), kinds=kinds), group=group
    )
    check_counts(train_state, "step", "tokens_seen")
    if train_state["step"] != step:
        raise CheckpointError(
            f"{source} must hold one step, its {storage.MANIFEST} says {step} and its train_state "
            f"{train_state['step']}; use another checkpoint"
        )
    state.progress.step = step
    state.progress.tokens_seen = train_state["tokens_seen"]
    if train_state["world_size"] != dist.get_world_size():
        logger.info("Another number of ranks: random generators start from debug.seed")
        return
    rank = dist.get_rank()
    stored = storage.stored_names(source, "train_state", group=group)
    rng = stored_generators(rng_tensors(rank=rank), stored)
    storage.read_tensors(source, "train_state", into=rng, group=group)
    set_rng(rng)


def stored_generators(states: Mapping[str, Tensor], stored: Collection[str]) -> dict[str, Tensor]:
    """Return the random generators that the checkpoint has too, and log which it lacks.

    One that was saved on CPUs knows nothing of a GPU's.
    """
    lacking = [name for name in states if name not in stored]
    if lacking:
        logger.info(
            "The checkpoint holds no random generators %s: they start from debug.seed",
            ", ".join(lacking),
        )
    return {name: state for name, state in states.items() if name in stored}


def _report(start: Start, *, taken: list[str], step: int) -> None:
    if start.intention == "recover":
        logger.info("Resumed from %s", start.source)
        return
    verb = "Continued" if start.intention == "continue" else "Finetuning at step 0"
    logger.info("%s from %s (step %d), loaded: %s", verb, start.source, step, ", ".join(taken))
    if start.differences:
        logger.info("Settings that are new:\n  %s", "\n  ".join(start.differences))


def _report_schedule(
    source: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, step: int
) -> None:
    """Log the learning rate as it was planned and as it is now, where they differ from now on."""
    if old == new:
        return
    try:
        rates = schedule_table(old, new, step=step)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{source}/lr_scheduler holds no schedule: {error}; leave it out: "
            f'checkpoint.exclude_from_loading = ["lr_scheduler"]'
        ) from error
    if not rates:
        return
    rows = [f"{at:>10} {before:>12.6g} {now:>12.6g}" for at, before, now in rates]
    head = f"{'step':>10} {'old lr':>12} {'new lr':>12}"
    logger.info("The learning rate is planned anew:\n%s", "\n".join([head, *rows]))


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
