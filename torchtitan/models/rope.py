"""Rotary position embedding: pairs of channels are rotated by angles that grow with the position.

A pair is two neighbouring channels (2i, 2i + 1), as in Meta's and torchtitan's weights. Hugging
Face pairs i with i + D/2 and permutes wq and wk to make up for it. Neighbours are a complex number
in memory, and rotating it is one product, where separate cosines and sines take seven operators in
forward and eight in backward. Queries and keys are rotated side by side in one tensor. Compiled
blocks use real numbers, which inductor fuses.

Cosines and sines are computed from integer positions once per forward, not kept in a buffer. A
complex buffer is destroyed by `model.to(dtype)`, a real one is rounded by it, and either needs care
on the meta device. Computing them costs S x P cosines, which is negligible beside one layer.
Angles are float64, since float32 is off by 0.008 rad at position 131072. The rotation is float32 in
every dtype of the model.

For contexts longer than in pretraining the frequencies are scaled (`RopeScaling`).

Shapes: B batch, S sequence, H heads, D width of a head, P pairs, R = 2 P rotated channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.sizes import RopeScaling


class Rope:
    """The rotation at S positions, or at B x S positions.

    This is a plain class because FSDP's mixed precision casts every float tensor that it finds
    among a block's arguments to bfloat16, in tuples, dictionaries and dataclasses too.

    Args:
        cos: Cosines of the angles, float32 (..., S, P).
        sin: Sines of the angles, float32 (..., S, P).
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin
        self.turn, self.turn_back = torch.complex(cos, sin), torch.complex(cos, -sin)

    def rotate(self, *xs_BSHD: Tensor) -> tuple[Tensor, ...]:
        """Rotate the first 2 P channels of queries and keys, and return them in their dtype."""
        if torch.compiler.is_compiling():
            return tuple(self._rotate_real(x) for x in xs_BSHD)
        turned: tuple[Tensor, ...] = _Rotated.apply(self, *xs_BSHD)
        return turned

    def _rotate_real(self, x_BSHD: Tensor) -> Tensor:
        cos, sin = self.cos[..., None, :], self.sin[..., None, :]  # the same for all heads
        pairs, kept = x_BSHD.tensor_split((2 * cos.shape[-1],), -1)
        even_BSHP, odd_BSHP = pairs.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = (even_BSHP * cos - odd_BSHP * sin, even_BSHP * sin + odd_BSHP * cos)
        turned_BSHR = torch.stack(turned, dim=-1).flatten(-2).type_as(x_BSHD)
        return torch.cat((turned_BSHR, kept), -1) if kept.shape[-1] else turned_BSHR


class _Rotated(torch.autograd.Function):
    """The rotation of several tensors, side by side in one; backward turns gradients back."""

    @staticmethod
    def forward(ctx: Any, rope: Rope, *xs_BSHD: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rope.turn_back)  # is freed in backward, unlike an attribute
        return _turn(xs_BSHD, rope.turn)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_turn(grads, *ctx.saved_tensors)


def _turn(xs_BSHD: Sequence[Tensor], turn: Tensor) -> tuple[Tensor, ...]:
    heads = [x.shape[2] for x in xs_BSHD]
    batch, length, _, width = xs_BSHD[0].shape
    exact_BSHD = torch.empty(batch, length, sum(heads), width, device=turn.device)
    for part, x_BSHD in zip(exact_BSHD.split(heads, dim=2), xs_BSHD, strict=True):
        part.copy_(x_BSHD)
    pairs_BSHP2 = exact_BSHD[..., : 2 * turn.shape[-1]].unflatten(-1, (-1, 2))
    torch.view_as_complex(pairs_BSHP2).mul_(turn[..., None, :])
    return exact_BSHD.to(xs_BSHD[0].dtype).split(heads, dim=2)


def build_rope(
    positions: Tensor, *, head_dim: int, theta: float, scaling: RopeScaling | None
) -> Rope:
    """Compute the rotation at integer positions.

    YaRN's temperature multiplies cosines and sines, as in the paper and in Hugging Face's code:
    queries and keys grow by it, scores by its square, and attention kernels need no change.

    Positions are (S) or (B, S); `head_dim` channels are rotated per head.
    """
    freqs_P = frequencies(head_dim, theta=theta, scaling=scaling, device=positions.device)
    angles = positions[..., None] * freqs_P
    size = 1.0 if scaling is None else scaling.temperature
    return Rope((size * angles.cos()).float(), (size * angles.sin()).float())


def frequencies(
    head_dim: int, *, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """Return the radians per position of each channel pair, float64 (P,).

    RoFormer (arXiv:2104.09864), then scaled.
    """
    exponents_P = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    freqs_P = theta**-exponents_P
    if scaling is None:
        return freqs_P
    assert scaling.factor is not None
    if scaling.type == "linear":
        return freqs_P / scaling.factor
    if scaling.type == "llama3":
        keep_P = _kept_by_llama3(freqs_P, scaling)
    else:
        assert scaling.type == "yarn"
        keep_P = _kept_by_yarn(freqs_P, scaling, theta=theta)
    return keep_P * freqs_P + (1 - keep_P) * freqs_P / scaling.factor


def _kept_by_llama3(freqs_P: Tensor, scaling: RopeScaling) -> Tensor:
    """Return the share of each frequency that stays unscaled, as in Llama 3.1's code.

    It is 0 for few turns in the original context, 1 for many, and linear in the number of turns
    between them.
    """
    values = scaling.used
    turns_P = freqs_P * values["original_max_position"] / (2 * math.pi)
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    return ((turns_P - low) / (high - low)).clamp(0, 1)


def _kept_by_yarn(freqs_P: Tensor, scaling: RopeScaling, *, theta: float) -> Tensor:
    """Return the share of each frequency that stays unscaled, as in YaRN's and Hugging Face's code.

    It is linear in the index of the pair, hence in the logarithm of its turns, between two pairs
    with about beta_fast and beta_slow turns.
    """
    head_dim, values = 2 * len(freqs_P), scaling.used

    def pair_with(turns: float) -> float:
        wavelength = values["original_max_position"] / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = (pair_with(values[beta]) for beta in ("beta_fast", "beta_slow"))
    if values["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # a step where the ramp is on a single pair, or outside of the existing pairs
    width = max(last - first, 1 if values["truncate"] else 0.001)
    pairs_P = torch.arange(len(freqs_P), dtype=torch.float64, device=freqs_P.device)
    return 1 - ((pairs_P - first) / width).clamp(0, 1)
