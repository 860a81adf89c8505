"""The norms of a decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.interface import CastsWeights
from torchtitan.models.sizes import DecoderConfig


class OffsetRMSNorm(nn.RMSNorm, CastsWeights):
    """RMSNorm that multiplies by 1 + weight: Gemma's.

    The sum is float32 or wider, because bfloat16 would lose small weights beside 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, scale, self.eps).type_as(x)


def build_norm(config: DecoderConfig, width: int | None = None) -> nn.RMSNorm:
    """Return the norm of `width` channels, default dim."""
    norm = OffsetRMSNorm if config.norm_offset else nn.RMSNorm
    return norm(config.dim if width is None else width, eps=config.norm_eps)
