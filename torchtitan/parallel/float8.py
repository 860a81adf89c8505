"""Linear layers in float8, by torchao.

A float8 product has twice the rate of bfloat16 on GPUs that support it. Weights and activations
have four bits of exponent and three of mantissa, gradients five and two. Each tensor, or each row
of it, is scaled to this small range by its largest absolute value, which is computed for every
product. The remaining computation stays bfloat16, and weights and optimizer float32. The layer's
parameter stays the same, so checkpoints are interchangeable.

Under tensor parallelism factors are DTensors. torchao takes the largest value of a sharded tensor
over all of its shards, so the scales equal the scales on one rank. Weights and activations are
gathered in bfloat16.

The output head stays bfloat16, because the loss is most sensitive to its rounding. So do experts,
which are not linear layers, and their router, which computes in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan.base.errors import ConfigError
from torchtitan.models.interface import CastsWeights
from torchtitan.models.spec import ModelSpec
from torchtitan.parallel.settings import MULTIPLE, Float8Config

SECTION = "quantize.linear.float8"
FIRST_CAPABILITY = (8, 9)


def load_torchao() -> Any:
    """Return torchao's module for training."""
    try:
        import torchao.float8
    except ImportError as error:
        raise ConfigError.at(
            "model.converters",
            "float8 needs the package torchao, which is not installed; in the repository: "
            "pip install -e '.[float8]'",
        ) from error
    return torchao.float8


def check_float8(settings: Float8Config, *, device_type: str) -> None:
    """Raise ConfigError unless this machine has torchao and can multiply float8."""
    load_torchao()
    has_units = device_type == "cuda" and torch.cuda.get_device_capability() >= FIRST_CAPABILITY
    if not settings.emulate and not has_units:
        raise ConfigError.at(
            (f"{SECTION}.emulate", "model.converters"),
            "must be true on a machine without GPUs of compute capability 8.9",
        )


def find_converted(model: nn.Module, *, settings: Float8Config) -> set[str]:
    """Return the names of the linear layers to convert, of a model or a pipeline stage."""
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, CastsWeights)
        and not any(part in name for part in settings.filter_fqns)
        and not any(size % MULTIPLE for size in module.weight.shape)
    }


def check_layers(model: nn.Module, *, settings: Float8Config, spec: ModelSpec, tp: int) -> None:
    """Check the layers of the full model, and that shards can be multiplied; raise ConfigError if a
    filter matches no layer, no layer is left, or `tp` is too large."""
    key, names = f"{SECTION}.filter_fqns", find_converted(model, settings=settings)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linear.add("output")  # a tied head is not a linear layer, but may be filtered too
    for part in settings.filter_fqns:
        if not any(part in name for name in linear):
            raise ConfigError.at(key, f'must be parts of linear layers\' names, got "{part}"')
    if not names:
        raise ConfigError.at(
            (key, "model.converters"),
            f"must leave a linear layer whose sizes are multiples of {MULTIPLE}",
        )
    if tp == 1 or settings.emulate:
        return
    from torchtitan.parallel.tensor import find_uneven_matrices

    weights = {f"{name}.weight": model.get_parameter(f"{name}.weight") for name in sorted(names)}
    if uneven := find_uneven_matrices(weights, plan=spec.tensor_plan, num=MULTIPLE * tp):
        raise ConfigError.at(
            ("parallelism.tensor_parallel_degree", "model.converters"),
            f"must leave multiples of {MULTIPLE} of the sharded sizes of float8 layers, got {tp} "
            f"for {uneven}; exclude them with {SECTION}.filter_fqns",
        )


def apply_float8(model: nn.Module, *, settings: Float8Config) -> None:
    """Convert the linear layers of `model`, except the head, to float8, in place."""
    names = find_converted(model, settings=settings)
    torchao = load_torchao()
    recipe = torchao.Float8LinearConfig.from_recipe_name(settings.recipe_name or "tensorwise")
    recipe = replace(recipe, emulate=settings.emulate)
    torchao.convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in names, config=recipe
    )
