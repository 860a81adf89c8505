"""Rotary position embedding: each pair of channels turns by an angle that grows with the position.

Pairs are neighbouring channels (2i, 2i + 1), the layout of Meta's and torchtitan's weights; Hugging
Face pairs i with i + D/2 instead and permutes wq and wk to make up for it. Neighbours are a complex
number in memory, and turning it is one product: an operator in forward and two in backward, one of
them small, where cosines and sines apart take seven and eight. Compiled blocks keep to real
numbers: inductor fuses those.

Cosines and sines are computed from integer positions once a forward rather than kept in a buffer. A
complex buffer is destroyed by `model.to(dtype)`, a real one is rounded by it, and either needs care
on the meta device; computing costs S x D/2 cosines, nothing beside one layer. Angles are float64,
since float32 is off by 0.008 rad at position 131072; the rotation is float32, whatever the model
computes in.

For contexts longer than those of pretraining the frequencies are scaled (`rope_scaling.py`).

Shapes: B batch, S sequence, H heads, D width of a head, P = D/2 pairs.
"""

from __future__ import annotations

import math

import torch

from torchtitan.models.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)


class Rope:
    """The rotation at S positions, or at B x S of them: float32 `cos` and `sin` of (..., S, P).

    `turn` is both as complex numbers.

    A plain class on purpose: FSDP's mixed precision casts every float tensor that it finds in a
    block's arguments to bfloat16, inside tuples, dictionaries and dataclasses too.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos = cos
        self.sin = sin
        self.turn = torch.complex(cos, sin)

    def rotate(self, x_BSHD: torch.Tensor) -> torch.Tensor:
        """Turn the channel pairs of queries or keys; the dtype stays."""
        # complex numbers must begin at even places: slices of latent attention may not
        pairs_BSHP2 = x_BSHD.float().contiguous().unflatten(-1, (-1, 2))
        if torch.compiler.is_compiling():
            cos, sin = self.cos[..., None, :], self.sin[..., None, :]  # the same for all heads
            even_BSHP, odd_BSHP = pairs_BSHP2.unbind(-1)
            turned_BSHP2 = torch.stack(
                (
                    even_BSHP * cos - odd_BSHP * sin,
                    even_BSHP * sin + odd_BSHP * cos,
                ),
                dim=-1,
            )
        else:
            turned_BSHP = torch.view_as_complex(pairs_BSHP2) * self.turn[..., None, :]
            turned_BSHP2 = torch.view_as_real(turned_BSHP)
        return turned_BSHP2.flatten(-2).type_as(x_BSHD)


def frequencies(
    head_dim: int, *, theta: float, scaling: RopeScaling | None, device: torch.device
) -> torch.Tensor:
    """Return the radians per position of each channel pair, float64 of shape (P,).

    RoFormer (arXiv:2104.09864), then scaled.
    """
    exponents_P = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    freqs_P = theta**-exponents_P
    match scaling:
        case None:
            return freqs_P
        case LinearScaling():
            return freqs_P / scaling.factor
        case Llama3Scaling():
            keep_P = _kept_by_llama3(freqs_P, scaling)
        case YarnScaling():
            keep_P = _kept_by_yarn(freqs_P, scaling, theta=theta)
    return keep_P * freqs_P + (1 - keep_P) * freqs_P / scaling.factor


def _kept_by_llama3(freqs_P: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Return the part of each frequency that stays, as in Llama 3.1's model code.

    0: few turns in the old context, stretched in full; 1: many turns, left alone; between them
    linear in the number of turns.
    """
    turns_P = freqs_P * scaling.original_max_position / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns_P - low) / (high - low)).clamp(0, 1)


def _kept_by_yarn(freqs_P: torch.Tensor, scaling: YarnScaling, *, theta: float) -> torch.Tensor:
    """Return the part of each frequency that stays, as in YaRN's and Hugging Face's code.

    0 and 1 as for Llama 3.1, but between them linear in the number of the pair, hence in the
    logarithm of its turns, from a whole pair to a whole pair.
    """
    head_dim = 2 * len(freqs_P)

    def pair_with(turns: float) -> float:
        wavelength = scaling.original_max_position / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with(scaling.beta_slow)), head_dim - 1)
    # a step where the whole ramp lies on one pair, or beyond the pairs there are
    width = max(last - first, 1)
    pairs_P = torch.arange(len(freqs_P), dtype=torch.float64, device=freqs_P.device)
    return 1 - ((pairs_P - first) / width).clamp(0, 1)


def build_rope(
    positions: torch.Tensor, *, head_dim: int, theta: float, scaling: RopeScaling | None
) -> Rope:
    """Compute the rotation at integer positions, (S) or (B, S).

    YaRN's temperature multiplies cosines and sines, as in the paper and in Hugging Face's code:
    queries and keys grow by it, scores by its square, without a word to the attention kernels.
    """
    freqs_P = frequencies(head_dim, theta=theta, scaling=scaling, device=positions.device)
    angles = positions[..., None] * freqs_P
    size = scaling.temperature if isinstance(scaling, YarnScaling) else 1.0
    return Rope((size * angles.cos()).float(), (size * angles.sin()).float())
