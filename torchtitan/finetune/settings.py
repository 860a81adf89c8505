"""The settings of low-rank adaptation: the [lora] section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from torchtitan.config.schema import FinitePositive, NonNegativeInt, Requires, Text


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Adapters: low-rank matrices beside frozen ones (LoRA), which alone are trained."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: none, and all of the model is trained."""
    alpha: Annotated[FinitePositive, Requires("rank", Ge(1))] = 16.0
    """What an adapter adds is scaled by alpha / rank."""
    modules: Annotated[tuple[Text, ...], Requires("rank", Ge(1))] = (
        "layers.*.attention.w*",
        "layers.*.feed_forward.w*",
    )
    """Linear layers (shell patterns) that get an adapter."""
    export_format: Annotated[
        Literal["merged", "adapter"],
        Requires("rank", Ge(1)),
        Requires("checkpoint.last_save_in_hf", True),
    ] = "merged"
    """What checkpoint.last_save_in_hf writes: the whole model with the adapters merged into its
    matrices, or only the adapters, as PEFT reads them."""
