"""The settings of low-rank adaptation: the [lora] section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.config.settings import ENABLED, FinitePositive, NonNegativeInt, Requires, Text


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (LoRA): the only trained parameters, beside frozen matrices."""

    rank: NonNegativeInt = 0
    """Rank of the adapters. 0: no adapters, and the full model is trained."""
    alpha: Annotated[FinitePositive, Requires("rank", ENABLED)] = 16.0
    """The product of an adapter is scaled by alpha / rank."""
    rank_stabilized: Annotated[bool, Requires("rank", ENABLED)] = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    modules: Annotated[tuple[Text, ...], Requires("rank", ENABLED)] = (
        "layers.*.attention.w*",
        "layers.*.feed_forward.w*",
    )
    """Linear layers with an adapter: shell patterns of their names; Hugging Face's names, such as
    q_proj; or all-linear."""
    train_embeddings: Annotated[bool, Requires("rank", ENABLED)] = False
    """Also train token embedding and output head in full, e.g. for tokens that the base lacks. An
    exported adapter then holds both."""
    export_format: Annotated[
        Literal["merged", "adapter"],
        Requires("rank", ENABLED),
        Requires("checkpoint.last_save_in_hf", True),
    ] = "merged"
    """Whether checkpoint.last_save_in_hf writes the model with merged adapters, or only the
    adapters, in PEFT's format."""

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
