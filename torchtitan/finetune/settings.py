"""The settings of low-rank adaptation: the [lora] section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass

from torchtitan.config.needs import AtLeast, Needs
from torchtitan.config.types import STRICT, FinitePositive, Strings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoRAConfig:
    """Adapters: low-rank matrices beside frozen ones (LoRA), which alone are trained."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: none, and all of the model is trained."""
    alpha: Annotated[FinitePositive, Needs("rank", AtLeast(1))] = 16.0
    """What an adapter adds is scaled by alpha / rank."""
    modules: Annotated[Strings, Needs("rank", AtLeast(1))] = (
        "layers.*.attention.w*",
        "layers.*.feed_forward.w*",
    )
    """Linear layers (shell patterns) that get an adapter."""
    export_format: Annotated[
        Literal["merged", "adapter"],
        Needs("rank", AtLeast(1)),
        Needs("checkpoint.last_save_in_hf", True),
    ] = "merged"
    """What checkpoint.last_save_in_hf writes: the whole model with the adapters merged into its
    matrices, or only the adapters, as PEFT reads them."""
