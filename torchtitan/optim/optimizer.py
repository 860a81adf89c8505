"""The optimizer: Muon, one of torch's, or a custom one, over groups of parameters.

Norm scales and biases are not decayed, because pulling them to zero does not regularize the
function that a layer computes. Name patterns select these parameters, and those with a learning
rate or weight decay of their own. Each combination is a parameter group of the optimizer.

A custom optimizer (`custom.py`) is any `torch.optim.Optimizer` that works elementwise. Checkpoints
hold the tensors in `state[p]`. That state is allocated as zeros before the first step, so that a
checkpoint can fill it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import ConfigError
from torchtitan.base.patterns import check_pattern, matches
from torchtitan.models.interface import (
    HasParameters,
    LanguageModel,
    TrainableParams,
    router_biases,
)
from torchtitan.optim.clip import SkippingOptimizer
from torchtitan.optim.settings import WITH_BETAS, GroupConfig, OptimizerConfig

logger = logging.getLogger(__name__)

OPTIONS = "optimizer.options"
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
) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters that require gradients. All ranks must call this.

    `dtype` is that of Muon's iteration.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if is_import_path(settings.name):
        from torchtitan.optim.custom import build_custom

        return build_custom(build_groups(parameters, settings), settings=settings)
    if settings.name != "Muon":
        return build_torch(build_groups(parameters, settings), settings=settings)
    from torchtitan.optim.muon import Muon, uses_muon

    matrices = {name: p for name, p in parameters.items() if uses_muon(name, p, settings)}
    vectors = {name: p for name, p in parameters.items() if name not in matrices}
    adamw = build_torch(build_groups(vectors, settings), settings=settings)
    create_state(adamw)
    return Muon(
        build_groups(matrices, settings),
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
    devices = [weight.device for weight in optimizer.param_groups[0]["params"][:1]]
    if isinstance(optimizer, SkippingOptimizer):
        devices = [optimizer.device]
    elif type(optimizer) not in FUSED:  # nor a subclass, whose own step may not know the flag
        return False
    return bool(optimizer.defaults["fused"]) and all(d.type == device.type for d in devices)


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
) -> TrainableParams:
    """Return which parameters of the full model are trained; check and log how.

    `only` has shell patterns of the parameters that can be trained at all. Raises ConfigError if a
    pattern matches nothing, nothing is left to train, or as `check_optimizer`.
    """
    parameters = dict(model.named_parameters())
    for pattern in settings.no_decay_params:
        # the default may match nothing: few models have a bias
        if pattern not in OptimizerConfig.no_decay_params:
            check_pattern(pattern, parameters, key="optimizer.no_decay_params", noun="parameter")
    trained = TrainableParams(only=only, frozen=settings.frozen_params)
    if trained != TrainableParams():
        biases = set(router_biases(model))
        trained.check(parameters, no_weights={n for n, p in parameters.items() if p in biases})
        total = sum(p.numel() for p in parameters.values())
        size = sum(p.numel() for name, p in parameters.items() if trained.includes(name))
        logger.info("Training %s of %s parameters", f"{size:,}", f"{total:,}")
    learned = {
        name: p for name, p in parameters.items() if trained.includes(name) and p.requires_grad
    }
    check_optimizer(settings, trained=learned)
    return trained


def check_optimizer(
    settings: OptimizerConfig,
    *,
    trained: Mapping[str, Tensor],
) -> None:
    """Check the settings against the trained parameters of the full model; raise ConfigError if a
    pattern matches nothing, or the optimizer does not take an option, cannot be built, or has a
    state that checkpoints cannot hold."""
    left = dict(trained)
    for number, group in enumerate(settings.groups, start=1):
        for pattern in group.params:
            check_pattern(pattern, trained, key="optimizer.groups", noun="trained parameter")
        chosen = {name for name in left if matches(name, group.params)}
        if not chosen:
            rule = f"table {number} must match a parameter that no table before it matches"
            raise ConfigError.at("optimizer.groups", rule)
        left = {name: p for name, p in left.items() if name not in chosen}
    if settings.name == "Muon":
        from torchtitan.optim.muon import check_muon

        check_muon(settings, trained=trained)
    if is_import_path(settings.name):
        from torchtitan.optim.custom import check_custom

        check_custom(settings, create_state=create_state)
    else:
        if "weight_decay" in settings.options:
            raise ConfigError.at(OPTIONS, "must not have weight_decay; set optimizer.weight_decay")
        for name in REFUSED_OPTIONS & settings.options.keys():
            if settings.options[name]:
                raise ConfigError.at(OPTIONS, f"must not change how a step works, got {name!r}")
        build_torch([{"params": [torch.zeros(1, requires_grad=True)]}], settings=settings)


def build_groups(
    parameters: Mapping[str, Tensor], settings: OptimizerConfig
) -> list[dict[str, Any]]:
    """Divide the parameters into groups; `lr_scale` is a group's share of the scheduled rate."""
    left, groups = dict(parameters), []
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


def build_torch(
    groups: list[dict[str, Any]], *, settings: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build torch's optimizer of that name. With Muon it is the one for all but matrices. Raises
    ConfigError if it refuses an option."""
    name = "AdamW" if settings.name == "Muon" else settings.name
    cls: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    implementation = settings.implementation
    if implementation == "fused" and cls not in FUSED:
        implementation = "foreach"  # torch's other fused kernels do not support sharded parameters
    arguments: dict[str, Any] = {"foreach": implementation == "foreach"}
    if "fused" in inspect.signature(cls).parameters:
        arguments["fused"] = implementation == "fused"
    if settings.name == "SGD":
        arguments["momentum"] = settings.momentum
    if settings.name in WITH_BETAS:
        arguments |= {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    try:
        return cls(groups, lr=settings.lr, **arguments, **settings.options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError.at(
            OPTIONS, f"torch.optim.{cls.__name__} refuses them: {error}"
        ) from error
