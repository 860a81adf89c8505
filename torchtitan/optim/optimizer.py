"""The optimizer: Muon or one of torch's own, with each parameter in the group where it belongs.

Norm scales and biases are not decayed: pulling them to zero does not regularise the function that a
layer computes. Name patterns decide which parameters those are, and which have a learning rate or a
decay of their own; each combination forms a parameter group of the optimizer.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.base.log import amount
from torchtitan.base.own import is_import_path
from torchtitan.models.parts import HasParameters
from torchtitan.models.trained import check_pattern
from torchtitan.optim.muon import Muon
from torchtitan.optim.own import check_own, make_optimizer
from torchtitan.optim.settings import WITH_BETAS, GroupConfig, OptimizerConfig
from torchtitan.optim.state import create_state

logger = logging.getLogger(__name__)

REFUSED_OPTIONS: Mapping[str, str] = {
    "capturable": "a step is not recorded as a CUDA graph",
    "dampening": "torch takes the first gradient undamped only if no state was made before, and a "
    "checkpoint may make it",
    "differentiable": "no gradient is taken through a step",
    "maximize": "the loss is to fall",
}
"""Arguments of torch's classes that do not fit the step."""


def build_optimizer(
    model: HasParameters,
    *,
    settings: OptimizerConfig,
    dtype: torch.dtype = torch.float32,
    sections: Mapping[str, object] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters of `model` that require gradients, on all ranks.

    `dtype`: in which Muon computes. `sections`: the user's own, for an optimizer of theirs.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if is_import_path(settings.name):
        return make_optimizer(_groups(named, settings), settings=settings, sections=sections)
    if settings.name != "Muon":
        return _torchs_own(_groups(named, settings), settings=settings)
    matrices = {name: p for name, p in named.items() if _is_muons(name, p, settings)}
    vectors = {name: p for name, p in named.items() if name not in matrices}
    others = _torchs_own(_groups(vectors, settings), settings=settings)
    create_state(others)
    return Muon(
        _groups(matrices, settings),
        names={p: name for name, p in matrices.items()},
        others=others,
        lr=settings.lr,
        momentum=settings.muon_momentum,
        dtype=dtype,
        device=next(p.device for _, p in model.named_parameters()),
    )


def check_optimizer(
    settings: OptimizerConfig,
    *,
    trained: Mapping[str, Tensor],
    sections: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Check the settings against the parameters of the whole model that are trained.

    Logs how many of them Muon updates, and how many each group has.

    Raises:
        ConfigError: A pattern matches nothing, or torch's class does not take an option.
    """
    left, shares = dict(trained), []
    for number, group in enumerate(settings.groups, start=1):
        for pattern in group.params:
            check_pattern(pattern, trained, key="optimizer.groups", what="trained parameter")
        own = {name for name in left if _matches(name, group.params)}
        if not own:
            rule = (
                f"table {number} has no parameter of its own: those before it match all of "
                f"{', '.join(group.params)}; put it first, or remove it"
            )
            raise ConfigError.at("optimizer.groups", rule)
        left = {name: p for name, p in left.items() if name not in own}
        shares.append(_share(number, group, size=len(own)))
    if settings.name == "Muon":
        for pattern in set(settings.muon_excluded_params) - set(
            OptimizerConfig.muon_excluded_params
        ):
            check_pattern(pattern, trained, key="optimizer.muon_excluded_params", what="parameter")
        size = sum(_is_muons(name, p, settings) for name, p in trained.items())
        if not size:
            rule = (
                "must leave Muon a matrix to train, got none; remove a pattern, or write "
                'optimizer.name = "AdamW"'
            )
            raise ConfigError.at("optimizer.muon_excluded_params", rule)
        muons = f"Muon updates {amount(size, 'parameter')}, AdamW {len(trained) - size}"
        shares.insert(0, muons)
    if is_import_path(settings.name):
        check_own(settings, sections=sections)
    else:
        _check_options(settings)
    if shares:
        logger.info("%s", "; ".join(shares))


def _share(number: int, group: GroupConfig, *, size: int) -> str:
    own = (("lr", group.lr), ("weight_decay", group.weight_decay))
    given = " and ".join(f"{key} {value:g}" for key, value in own if value is not None)
    return f"group {number}: {amount(size, 'parameter')} at {given}"


def _check_options(settings: OptimizerConfig) -> None:
    taken = {"params", "lr", "weight_decay", *_arguments(settings)}
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(_class(settings)).parameters.items()
        if name not in taken
    }
    for name, value in settings.options.items():
        rule = _problem(name, value, defaults=defaults, settings=settings)
        if rule:
            raise ConfigError.at("optimizer.options", rule)
    try:
        _try_step(settings)
    except Exception as error:  # whatever torch's code makes of them
        rule = (
            f"torch.optim.{_class(settings).__name__} refuses them: {error}; correct or remove it"
        )
        raise ConfigError.at("optimizer.options", rule) from error


def _problem(
    name: str, value: object, *, defaults: Mapping[str, object], settings: OptimizerConfig
) -> str:
    """Say what is wrong with one of the options, or nothing."""
    if name not in defaults:
        known = defaults.keys() - REFUSED_OPTIONS.keys()
        return (
            f"{name!r} is no argument of torch.optim.{_class(settings).__name__} without a "
            f"setting of its own{did_you_mean(name, known)}; valid are "
            f"{', '.join(sorted(known))}"
        )
    if name in REFUSED_OPTIONS and value:
        return f"{name!r} cannot be used: {REFUSED_OPTIONS[name]}; remove it"
    if isinstance(defaults[name], bool):
        is_right, kind = isinstance(value, bool), "true or false"
    else:
        is_right = isinstance(value, (int, float)) and not isinstance(value, bool)
        kind = "a number"
    return "" if is_right else f"{name!r} must be {kind}, got {value!r}; correct or remove it"


def _try_step(settings: OptimizerConfig) -> None:
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    _torchs_own([{"params": [parameter]}], settings=settings).step()


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_muons(name: str, parameter: Tensor, settings: OptimizerConfig) -> bool:
    """Tell whether Muon updates a parameter: a matrix, or matrices stacked along one dimension."""
    return parameter.ndim in (2, 3) and not _matches(name, settings.muon_excluded_params)


def _groups(named: Mapping[str, Tensor], settings: OptimizerConfig) -> list[dict[str, Any]]:
    """Deal the parameters out to groups; `lr_scale` is a group's part of the scheduled rate."""
    left, groups = dict(named), []
    for own in (*settings.groups, GroupConfig(params=("*",))):
        chosen = {name for name in left if _matches(name, own.params)}
        kept = {name for name in chosen if _matches(name, settings.no_decay_params)}
        decay = settings.weight_decay if own.weight_decay is None else own.weight_decay
        lr_scale = 1.0 if own.lr is None else own.lr / settings.lr
        for names, weight_decay in ((chosen - kept, decay), (kept, 0.0)):
            groups.append(
                {
                    "params": [p for name, p in left.items() if name in names],
                    "weight_decay": weight_decay,
                    "lr_scale": lr_scale,
                }
            )
        left = {name: p for name, p in left.items() if name not in chosen}
    # a rank that trains nothing keeps one, empty: torch refuses an optimizer without any
    return [group for group in groups if group["params"]] or groups[:1]


def _class(settings: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Return torch's class of that name; Muon's is the one beside it."""
    name = "AdamW" if settings.name == "Muon" else settings.name
    found: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return found


def _torchs_own(
    groups: list[dict[str, Any]], *, settings: OptimizerConfig
) -> torch.optim.Optimizer:
    return _class(settings)(groups, lr=settings.lr, **_arguments(settings), **settings.options)


def _arguments(settings: OptimizerConfig) -> dict[str, Any]:
    """Return what the settings say to torch's class, besides rates and decay."""
    implementation = settings.implementation
    if implementation == "fused" and _class(settings) not in (torch.optim.Adam, torch.optim.AdamW):
        implementation = "foreach"  # torch's other fused kernels do not support sharded parameters
    arguments: dict[str, Any] = {"foreach": implementation == "foreach"}
    if "fused" in inspect.signature(_class(settings)).parameters:
        arguments["fused"] = implementation == "fused"
    if settings.name == "SGD":
        arguments["momentum"] = settings.momentum
    if settings.name in WITH_BETAS:
        arguments |= {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    return arguments


def skips_by_itself(optimizer: torch.optim.Optimizer, *, device: torch.device) -> bool:
    """Tell whether `take_step` changes nothing if the norm, on `device`, is not finite.

    That needs the weights on the same device: elsewhere the flag would be read before it arrives.
    """
    weights = optimizer.param_groups[0]["params"][:1]
    return bool(optimizer.defaults.get("fused")) and all(
        weight.device.type == device.type for weight in weights
    )


def take_step(optimizer: torch.optim.Optimizer, *, norm: Tensor) -> None:
    """Update the weights by their gradients, whose global norm is `norm`, and clear these.

    With a norm that is not finite they stay. A fused kernel reads that on the device, by the flag
    that torch's gradient scaler sets; the others wait for it.
    """
    if skips_by_itself(optimizer, device=norm.device):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
