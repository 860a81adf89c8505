"""Matrix products in float8, by torchao.

A linear layer of a block multiplies numbers of eight bits: four of exponent and three of mantissa
for weights and activations, five and two for gradients. That is twice bfloat16's rate on GPUs that
have it. A scale fits each tensor, or each row of it, to so small a range; it is found anew at each
product from the largest number there. What surrounds the products stays bfloat16, weights and
optimizer float32, and the layer's parameter is the one that it had, so checkpoints interchange.

The output head stays bfloat16: its loss is most sensitive to rounding. So do experts, which are no
linear layers, and their router, which computes in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan.base.errors import ConfigError
from torchtitan.models.interface import CastsWeights
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
    """Check that this machine can compute in float8."""
    load_torchao()
    if settings.emulate:
        return
    if device_type == "cuda" and torch.cuda.get_device_capability() >= FIRST_CAPABILITY:
        return
    raise ConfigError.at(
        (f"{SECTION}.emulate", "model.converters"),
        f"must be true: this machine's {'GPUs' if device_type == 'cuda' else 'CPUs'} cannot "
        "multiply float8 (GPUs can from compute capability 8.9 on); write emulate = true to try it "
        "out, or model.converters = [] to train in bfloat16",
    )


def find_converted(model: nn.Module, *, settings: Float8Config) -> set[str]:
    """Return the names of the linear layers of `model` that are to multiply in float8.

    Raises:
        ConfigError: A name to leave out is no layer's, or nothing is left.
    """
    key = f"{SECTION}.filter_fqns"
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    names = {*linear, "output"}  # a tied head is no linear layer, and stays all the same
    for part in settings.filter_fqns:
        if not any(part in name for name in names):
            raise ConfigError.at(
                key,
                f'no linear layer\'s name contains "{part}"; names are like '
                "layers.0.attention.wq, layers.0.feed_forward.w1 and output",
            )

    def is_converted(module: nn.Linear, name: str) -> bool:
        return (
            not isinstance(module, CastsWeights)
            and not any(part in name for part in settings.filter_fqns)
            and module.in_features % MULTIPLE == 0
            and module.out_features % MULTIPLE == 0
        )

    converted = {name for name, module in linear.items() if is_converted(module, name)}
    if not converted:
        raise ConfigError.at(
            (key, "model.converters"),
            f"no layer is left to convert: all are filtered out, or have sizes that {MULTIPLE} "
            "does not divide; remove names from it, or write model.converters = []",
        )
    return converted


def apply_float8(model: nn.Module, *, settings: Float8Config) -> None:
    """Let the linear layers of `model`, but for the head, multiply in float8, in place."""
    names = find_converted(model, settings=settings)
    torchao = load_torchao()
    recipe = torchao.Float8LinearConfig.from_recipe_name(settings.recipe_name or "tensorwise")
    recipe = replace(recipe, emulate=settings.emulate)
    torchao.convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in names, config=recipe
    )
