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

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError, DataError
from torchtitan.base.patterns import matches
from torchtitan.checkpoint.reader import read_tensors, stored_shapes
from torchtitan.checkpoint.settings import COMPONENTS
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.checkpoint.start import Start
from torchtitan.checkpoint.state import (
    STEP,
    RunState,
    model_tensors,
    optimizer_tensors,
    rng_tensors,
)
from torchtitan.mesh.ranks import union
from torchtitan.models.init import local_part

logger = logging.getLogger(__name__)
OPTIMIZER = "optimizer."
"""Prefix of a parameter's name: its optimizer state."""


def restore(state: RunState, *, start: Start, group: dist.ProcessGroup) -> None:
    """Load into the run what `start` asks for. Everything else keeps its initial state.

    Raises CheckpointError if the checkpoint lacks a component, or does not fit the run. Raises
    DataError if the data position counts samples of other data.
    """
    source = start.source
    components = ("model",) if start.mode == "finetune" else COMPONENTS
    loaded = [name for name in components if name not in start.exclude]
    if isinstance(source, Checkpoint):
        missing = [name for name in loaded if name not in source.manifest["components"]]
        if missing:
            raise CheckpointError(
                f"{source.path} lacks {', '.join(missing)}; use a full checkpoint, or load only "
                f"the weights: checkpoint.initial_load_path with initial_load_model_only = true"
            )
    check_patterns(state, start, loaded=loaded, group=group)
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
    parts = ", ".join(name for name in loaded if name != "lr_scheduler")  # of the settings
    logger.info("%s at step %d from %s, loaded: %s", verb, state.progress.step, source.path, parts)
    if start.differences:
        logger.info("Settings that are new:\n  %s", "\n  ".join(start.differences))


def check_patterns(
    state: RunState, start: Start, *, loaded: Collection[str], group: dist.ProcessGroup
) -> None:
    """Raise CheckpointError if an entry of `exclude_from_loading` matches nothing. Collective."""
    patterns = [entry for entry in start.exclude if entry not in COMPONENTS]
    if not patterns:
        return
    names = set(union(dict.fromkeys(model_tensors(state.model)), group=group))
    if "model" in loaded:
        names |= start.source.shapes().keys()
    if "optimizer" in loaded:
        states = stored_shapes(start.source.path, "optimizer", group=group)
        names |= {OPTIMIZER + _parameter(name) for name in states}
    unused = [pattern for pattern in patterns if not any(matches(n, [pattern]) for n in names)]
    if unused:
        raise CheckpointError(
            f"checkpoint.exclude_from_loading: '{unused[0]}' must match a component "
            f"({', '.join(COMPONENTS)}), a parameter of the model or the checkpoint, or optimizer "
            f"state that is loaded"
        )


def _restore_optimizer(state: RunState, source: Checkpoint, start: Start) -> None:
    wanted = optimizer_tensors(state.model, state.optimizer)
    stored, skipped = set(stored_shapes(source.path, "optimizer", group=source.group)), set[str]()
    if start.mode == "continue":
        skipped = skipped_parameters(
            wanted, stored - {STEP}, state=state, exclude=start.exclude, group=source.group
        )
        wanted = {name: t for name, t in wanted.items() if _parameter(name) not in skipped}
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
        may_skip=lambda name: _parameter(name) in skipped,
    )
    for count in counts:
        count.fill_(wanted[STEP])


def skipped_parameters(
    wanted: Collection[str],
    stored: Collection[str],
    *,
    state: RunState,
    exclude: Collection[str],
    group: dist.ProcessGroup | None,
) -> set[str]:
    """Return the parameters whose optimizer state a continued run does not read. Collective.

    They are excluded, were frozen when the checkpoint was saved, or are frozen now. The last two
    are logged.

    `wanted` has the names of the optimizer state on this rank, `stored` those in the checkpoint.
    """
    parameters = dict(state.model.named_parameters())
    is_trained = union({name: p.requires_grad for name, p in parameters.items()}, group=group)
    now = set(union(dict.fromkeys(map(_parameter, wanted)), group=group))
    before = set(map(_parameter, stored))
    excluded = {
        name
        for name in before | now
        if matches(name, exclude) or matches(OPTIMIZER + name, exclude)
    }
    # without any stored state, the optimizer was of a kind that has none
    fresh = now - before if before else set[str]()
    unread = {name for name in before - excluded if not is_trained.get(name, True)}
    for names, change in ((fresh, "start with fresh optimizer state"), (unread, "are frozen now")):
        if names:
            text = ", ".join(sorted(names)[:8]) + (f" ... ({len(names)})" if names else "")
            logger.info("Other parameters are trained than before: %s %s", text, change)
    return excluded | fresh | unread


def _parameter(state_name: str) -> str:
    """`output.weight.exp_avg` -> `output.weight`"""
    return state_name.rpartition(".")[0]


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
    if stored["step"] != source.manifest["step"]:
        raise CheckpointError(f"{source.path} holds two steps; use another checkpoint")
    state.progress.step, state.progress.tokens_seen = stored["step"], stored["tokens_seen"]
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
