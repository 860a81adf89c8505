"""Tensors of a checkpoint that a run does not read.

`checkpoint.exclude_from_loading` names components and shell patterns. A pattern is matched with
names of parameters, e.g. `output.weight`, and with names of their optimizer state, which start with
the component: `optimizer.output.weight`. The state of an excluded parameter is excluded too: it
belongs to the weights that were dropped.

In mode "continue" other parameters may be trained than before (`optimizer.frozen_params`, LoRA).
A parameter that was frozen has no stored state and starts with a fresh one, as it would in a plain
torch loop that adds it to the optimizer. The state of a parameter that is frozen now is not read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError, Mistakes
from torchtitan.base.log import plural
from torchtitan.base.patterns import matches
from torchtitan.checkpoint.load import stored_shapes
from torchtitan.checkpoint.start import Start
from torchtitan.checkpoint.state import COMPONENTS, STEP, RunState, model_tensors
from torchtitan.mesh.ranks import union
from torchtitan.models.interface import HasParameters

logger = logging.getLogger(__name__)
KEY = "checkpoint.exclude_from_loading"
OPTIMIZER = "optimizer."
"""Prefix of a parameter's name: its optimizer state."""


def check_excluded(entries: Collection[str], *, model: HasParameters) -> None:
    """Check that each entry without a dot or wildcard is a component or a parameter of the model.

    Patterns may match parameters that only the checkpoint has.

    Raises:
        ConfigError: Lists the other entries.
    """
    mistakes, parameters = Mistakes(), dict(model.named_parameters())
    for entry in entries:
        name = entry.removeprefix(OPTIMIZER)
        if entry in COMPONENTS or name in parameters or set(name) & set(".*?["):
            continue
        mistakes.add(
            KEY,
            f"'{entry}' must be a component ({', '.join(COMPONENTS)}) or a pattern of parameters, "
            f'as "output.*"',
        )
    mistakes.report()


def log_excluded(
    state: RunState, start: Start, *, loaded: Collection[str], group: dist.ProcessGroup
) -> None:
    """Log what each pattern excludes; warn if it drops stored weights. Collective.

    Raises:
        CheckpointError: A pattern matches nothing.
    """
    patterns = [entry for entry in start.exclude if entry not in COMPONENTS]
    if not patterns:
        return
    sizes = union({n: p.numel() for n, p in model_tensors(state.model).items()}, group=group)
    stored = set(start.source.shapes()) if "model" in loaded else set[str]()
    states = set[str]()
    if "optimizer" in loaded:
        names = stored_shapes(start.source.path, "optimizer", group=group)
        states = {_parameter(name) for name in names if name != STEP}
    for pattern in patterns:
        found = {name for name in sizes.keys() | stored | states if matches(name, [pattern])}
        if not found:
            found = {name for name in states if matches(OPTIMIZER + name, [pattern])}
            if not found:
                raise CheckpointError(
                    f"{KEY}: '{pattern}' must be a component ({', '.join(COMPONENTS)}), or match a "
                    f"parameter of the model or the checkpoint, or optimizer state that is loaded"
                )
            logger.info("Excluded by '%s': optimizer state of %s", pattern, _listed(found))
        elif not stored & sizes.keys() & found:
            logger.info("Excluded by '%s': %s", pattern, _listed(found))
        else:
            logger.warning(
                "Excluded by '%s': %s; %s of the model keep their initial values",
                pattern,
                _listed(found),
                plural(sum(sizes.get(name, 0) for name in found), "weight"),
            )


def skipped_optimizer_state(
    wanted: Collection[str], *, state: RunState, start: Start, group: dist.ProcessGroup | None
) -> set[str]:
    """Return the names of optimizer state that a continued run does not read. Collective.

    They are those of excluded parameters, of parameters that were frozen when the checkpoint was
    saved, and of those that are frozen now. The last two are logged.

    Args:
        wanted: Names of the optimizer state on this rank, as in `optimizer_tensors`.
    """
    parts = dict(state.model.named_parameters())
    is_trained = union({name: p.requires_grad for name, p in parts.items()}, group=group)
    names = union(dict.fromkeys(wanted), group=group).keys()
    stored_names = stored_shapes(start.source.path, "optimizer", group=group).keys() - {STEP}
    stored, held = set(map(_parameter, stored_names)), set(map(_parameter, names))
    excluded = {
        name
        for name in stored | held
        if matches(name, start.exclude) or matches(OPTIMIZER + name, start.exclude)
    }
    # without any stored state, the optimizer was of a kind that has none
    fresh = held - stored if stored else set[str]()
    unread = {name for name in stored - excluded if not is_trained.get(name, True)}
    changes = []
    if fresh:
        changes.append(f"{_listed(fresh)} start with fresh optimizer state")
    if unread:
        changes.append(f"the stored state of {_listed(unread)} is not read: frozen now")
    if changes:
        logger.info("Other parameters are trained than before: %s", "; ".join(changes))
    skipped = excluded | fresh | unread
    return {name for name in {*names, *stored_names} if _parameter(name) in skipped}


def _parameter(state_name: str) -> str:
    """`output.weight.exp_avg` -> `output.weight`"""
    return state_name.rpartition(".")[0]


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:8]) + (" ..." if len(names) > 8 else "")
    return f"{plural(len(names), 'parameter')}: {shown}"
