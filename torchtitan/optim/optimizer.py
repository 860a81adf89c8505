"""The optimizer: Muon, one of torch's, or a custom one, over groups of parameters.

Norm scales and biases are not decayed, because pulling them to zero does not regularize the
function that a layer computes. Name patterns select these parameters, and those with a learning
rate or weight decay of their own. Each combination is a parameter group of the optimizer.

A custom optimizer is any `torch.optim.Optimizer` that works elementwise. Checkpoints hold the
tensors in `state[p]`. That state is allocated as zeros before the first step, so that a checkpoint
can fill it. An optimizer that keeps anything but tensors, or starts from other values, would change
its course at a resume, so `check_optimizer` compares one step of a small parameter from each state.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchtitan.base.custom import convert_errors, instantiate, is_import_path, load_object
from torchtitan.base.errors import ConfigError
from torchtitan.base.log import plural
from torchtitan.base.patterns import check_pattern, matches
from torchtitan.models.interface import (
    HasParameters,
    LanguageModel,
    TrainableParams,
    router_biases,
)
from torchtitan.optim.settings import WITH_BETAS, GroupConfig, OptimizerConfig

logger = logging.getLogger(__name__)

NAME, OPTIONS = "optimizer.name", "optimizer.options"
FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Classes with a kernel that skips the update if `found_inf` is set."""
REFUSED_OPTIONS = frozenset({"capturable", "dampening", "differentiable", "maximize"})
"""Arguments of torch's classes that the step does not support. (With dampening torch takes the
first gradient undamped only if no state exists, and a checkpoint may have made it.)"""


def build_optimizer(
    model: HasParameters,
    *,
    settings: OptimizerConfig,
    dtype: torch.dtype = torch.float32,
    sections: Mapping[str, object] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters that require gradients. All ranks must call this.

    Args:
        model: Holds the parameters.
        settings: The section [optimizer].
        dtype: Dtype of Muon's iteration.
        sections: Custom sections that a custom optimizer may ask for.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if is_import_path(settings.name):
        return _build_custom(_groups(named, settings), settings=settings, sections=sections)
    if settings.name != "Muon":
        return _build_torch(_groups(named, settings), settings=settings)
    from torchtitan.optim.muon import Muon

    matrices = {name: p for name, p in named.items() if _uses_muon(name, p, settings)}
    vectors = {name: p for name, p in named.items() if name not in matrices}
    adamw = _build_torch(_groups(vectors, settings), settings=settings)
    create_state(adamw)
    return Muon(
        _groups(matrices, settings),
        names={p: name for name, p in matrices.items()},
        adamw=adamw,
        lr=settings.lr,
        momentum=settings.muon_momentum,
        dtype=dtype,
        device=next(p.device for _, p in model.named_parameters()),
    )


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state (zeros) without updating parameters."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                value.fill_(1.0 if key == "mu_product" else 0.0)  # NAdam's product of decays


def supports_found_inf(optimizer: torch.optim.Optimizer, *, device: torch.device) -> bool:
    """Return whether `optimizer_step` decides on the device if a norm on `device` is finite.

    The weights must be on the same device: elsewhere the flag would be read before it arrives.
    """
    # not a subclass, whose own step may not know the flag
    is_fused = type(optimizer) in FUSED and optimizer.defaults["fused"]
    weights = optimizer.param_groups[0]["params"][:1]
    return is_fused and all(weight.device.type == device.type for weight in weights)


def optimizer_step(optimizer: torch.optim.Optimizer, *, norm: Tensor) -> None:
    """Update the weights unless `norm` is not finite; clear gradients.

    `norm` is the global gradient norm, or infinity for a step that is to be left out.
    A fused kernel reads this on the device, by the flag that torch's gradient scaler sets. With
    other kernels the host waits for the norm.
    """
    if supports_found_inf(optimizer, device=norm.device):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()


def find_trainable(
    model: LanguageModel,
    *,
    settings: OptimizerConfig,
    only: tuple[str, ...] = ("*",),
    sections: Mapping[str, object] = MappingProxyType({}),
) -> TrainableParams:
    """Return which parameters of the full model are trained; check and log how.

    Args:
        model: The full model, on the meta device.
        settings: The section [optimizer].
        only: Shell patterns of the parameters that can be trained at all.
        sections: Custom sections that a custom optimizer may ask for.

    Raises:
        ConfigError: A pattern matches nothing, nothing is left to train, or as `check_optimizer`.
    """
    parameters = dict(model.named_parameters())
    for pattern in settings.no_decay_params:
        # the default may match nothing: few models have a bias
        if pattern not in OptimizerConfig.no_decay_params:
            check_pattern(pattern, parameters, key="optimizer.no_decay_params", what="parameter")
    trained = TrainableParams(only=only, frozen=settings.frozen_params)
    if trained != TrainableParams():
        biases = set(router_biases(model))
        trained.check(parameters, no_weights={n for n, p in parameters.items() if p in biases})
        total = sum(p.numel() for p in parameters.values())
        size = sum(p.numel() for name, p in parameters.items() if trained.includes(name))
        logger.info("Trained are %s of %s parameters", f"{size:,}", f"{total:,}")
    learned = {
        name: p for name, p in parameters.items() if trained.includes(name) and p.requires_grad
    }
    check_optimizer(settings, trained=learned, sections=sections)
    return trained


def check_optimizer(
    settings: OptimizerConfig,
    *,
    trained: Mapping[str, Tensor],
    sections: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Check the settings against the trained parameters of the full model, and log the groups.

    Raises:
        ConfigError: A pattern matches nothing, or the optimizer does not take an option, cannot be
            built, or has a state that checkpoints cannot hold.
    """
    left, shares = dict(trained), []
    for number, group in enumerate(settings.groups, start=1):
        for pattern in group.params:
            check_pattern(pattern, trained, key="optimizer.groups", what="trained parameter")
        chosen = {name for name in left if matches(name, group.params)}
        if not chosen:
            rule = (
                f"table {number} has no parameter of its own: those before it match all of "
                f"{', '.join(group.params)}; put it first, or remove it"
            )
            raise ConfigError.at("optimizer.groups", rule)
        left = {name: p for name, p in left.items() if name not in chosen}
        shares.append(_describe_group(number, group, size=len(chosen)))
    if settings.name == "Muon":
        shares.insert(0, _check_muon(settings, trained=trained))
    if is_import_path(settings.name):
        _check_custom(settings, sections=sections)
    else:
        _check_options(settings)
    if shares:
        logger.info("%s", "; ".join(shares))


def _describe_group(number: int, group: GroupConfig, *, size: int) -> str:
    values = (("lr", group.lr), ("weight_decay", group.weight_decay))
    given = " and ".join(f"{key} {value:g}" for key, value in values if value is not None)
    return f"group {number}: {plural(size, 'parameter')} at {given}"


def _check_muon(settings: OptimizerConfig, *, trained: Mapping[str, Tensor]) -> str:
    """Check that Muon updates a parameter, and describe how many."""
    for pattern in set(settings.muon_excluded_params) - set(OptimizerConfig.muon_excluded_params):
        check_pattern(pattern, trained, key="optimizer.muon_excluded_params", what="parameter")
    size = sum(_uses_muon(name, p, settings) for name, p in trained.items())
    if not size:
        rule = (
            "must leave Muon a matrix to train, got none; remove a pattern, or write "
            'optimizer.name = "AdamW"'
        )
        raise ConfigError.at("optimizer.muon_excluded_params", rule)
    return f"Muon updates {plural(size, 'parameter')}, AdamW {len(trained) - size}"


def _check_options(settings: OptimizerConfig) -> None:
    cls = f"torch.optim.{_class(settings).__name__}"
    refused = {name for name in REFUSED_OPTIONS if settings.options.get(name)}
    with_settings = {"lr", "weight_decay", *_arguments(settings)}
    for name in settings.options:
        if name in refused | with_settings:
            rule = f"must be arguments of {cls} that fit the step and have no setting of their own"
            raise ConfigError.at(OPTIONS, f"{rule}, got {name!r}")
    try:
        _build_torch([{"params": [torch.zeros(1, requires_grad=True)]}], settings=settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError.at(OPTIONS, f"{cls} refuses them: {error}") from error


def _check_custom(settings: OptimizerConfig, *, sections: Mapping[str, object]) -> None:
    """Check that a checkpoint can hold the state of a custom optimizer."""

    def first_step(*, state_first: bool) -> tuple[Tensor, Mapping[str, object]]:
        p = torch.ones(2, 3, requires_grad=True)
        groups = [{"params": [p], "weight_decay": settings.weight_decay, "lr_scale": 1.0}]
        optimizer = _build_custom(groups, settings=settings, sections=sections)
        if state_first:
            create_state(optimizer)
        p.grad = torch.full_like(p, 0.5)
        with convert_errors(settings.name, key=NAME):
            optimizer.step()
        return p.detach(), optimizer.state[p]

    weight, state = first_step(state_first=False)
    for key, value in state.items():
        if not isinstance(value, Tensor):
            rule = f"'{settings.name}' must keep only tensors in its state, for checkpoints"
            raise ConfigError.at(NAME, f"{rule}, got {value!r:.60} for {key!r}")
    if not torch.equal(weight, first_step(state_first=True)[0]):
        raise ConfigError.at(
            NAME,
            f"'{settings.name}' must initialize its state with zeros, because checkpoint loading "
            f"allocates zeros",
        )


def _uses_muon(name: str, parameter: Tensor, settings: OptimizerConfig) -> bool:
    """Return whether Muon updates a parameter: a matrix, or stacked matrices."""
    return parameter.ndim in (2, 3) and not matches(name, settings.muon_excluded_params)


def _groups(named: Mapping[str, Tensor], settings: OptimizerConfig) -> list[dict[str, Any]]:
    """Divide the parameters into groups; `lr_scale` is a group's share of the scheduled rate."""
    left, groups = dict(named), []
    for group in (*settings.groups, GroupConfig(params=("*",))):
        chosen = {name for name in left if matches(name, group.params)}
        undecayed = {name for name in chosen if matches(name, settings.no_decay_params)}
        decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
        lr_scale = 1.0 if group.lr is None else group.lr / settings.lr
        for names, weight_decay in ((chosen - undecayed, decay), (undecayed, 0.0)):
            groups.append(
                {
                    "params": [p for name, p in left.items() if name in names],
                    "weight_decay": weight_decay,
                    "lr_scale": lr_scale,
                }
            )
        left = {name: p for name, p in left.items() if name not in chosen}
    # a rank that trains nothing keeps an empty group: torch refuses an optimizer without groups
    return [group for group in groups if group["params"]] or groups[:1]


def _class(settings: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Return torch's class of that name. With Muon it is the one for all but matrices."""
    name = "AdamW" if settings.name == "Muon" else settings.name
    found: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return found


def _build_torch(
    groups: list[dict[str, Any]], *, settings: OptimizerConfig
) -> torch.optim.Optimizer:
    return _class(settings)(groups, lr=settings.lr, **_arguments(settings), **settings.options)


def _arguments(settings: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments of torch's class besides rates, decay and options."""
    implementation = settings.implementation
    if implementation == "fused" and _class(settings) not in FUSED:
        implementation = "foreach"  # torch's other fused kernels do not support sharded parameters
    arguments: dict[str, Any] = {"foreach": implementation == "foreach"}
    if "fused" in inspect.signature(_class(settings)).parameters:
        arguments["fused"] = implementation == "fused"
    if settings.name == "SGD":
        arguments["momentum"] = settings.momentum
    if settings.name in WITH_BETAS:
        arguments |= {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    return arguments


def _build_custom(
    groups: list[dict[str, Any]], *, settings: OptimizerConfig, sections: Mapping[str, object]
) -> torch.optim.Optimizer:
    """Build the optimizer at the import path `optimizer.name`."""
    fixed = {
        "params": groups,
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        **sections,
    }
    parameters = inspect.signature(load_object(settings.name, key=NAME)).parameters.keys()
    for option in settings.options:
        if option in fixed or option not in parameters:
            rule = f"must be arguments of {settings.name} without a setting of their own"
            raise ConfigError.at(OPTIONS, f"{rule}, got {option!r}")
    made = instantiate(settings.name, key=NAME, kwargs=fixed | dict(settings.options))
    if not isinstance(made, torch.optim.Optimizer):
        rule = f"'{settings.name}' must be a torch.optim.Optimizer"
        raise ConfigError.at(NAME, f"{rule}, got {made!r:.80}")
    return made
