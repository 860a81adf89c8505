"""The CUDA branches of a ring's blocks, with plain kernels under the CUDA operators' names.

The kernels are registered with torch's dispatcher, which binds the arguments and checks the results
by the operator's own schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.models import kernels as attention
from torchtitan.models.kernels import attend, attend_backward
from torchtitan.parallel.context.attention import merge

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
ALIGNMENT = 32
SEED = torch.zeros((), dtype=torch.int64)


def scores(q: Tensor, k: Tensor, *, causal: bool, bias: Tensor | None = None) -> Tensor:
    found = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    if bias is not None:  # what the CUDA kernel asks of it
        assert bias.dtype == q.dtype
        assert bias.shape == found.shape
        assert bias.stride()[:2] == (0, 0)
        assert (bias.stride(2) % 16, bias.stride(3)) == (0, 1)
        found = found + bias
    later = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1)
    return found.masked_fill(later, -math.inf) if causal else found


def forward(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> tuple[Tensor, Tensor]:
    assert q.shape[1] == k.shape[1] == v.shape[1]
    found = scores(q, k, **mask)
    return (found.softmax(-1) @ v.float()).to(q.dtype), found.logsumexp(-1)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **mask: Any
) -> tuple[Tensor, Tensor, Tensor]:
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert out.is_contiguous()
    p = (scores(q, k, **mask) - lse[..., None]).exp()
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    ds = p * (grad.float() @ v.float().mT - delta) / math.sqrt(q.shape[-1])
    dq, dk, dv = ds @ k.float(), ds.mT @ q.float(), p.mT @ grad.float()
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    assert q.dtype == torch.bfloat16
    assert dropout_p == 0
    seed = torch.zeros(2, dtype=torch.uint64)
    # heads in groups: query head i attends to head i // (H / K), as the kernel defines it
    group = [i // (q.shape[1] // k.shape[1]) for i in range(q.shape[1])]
    out, lse = forward(q, k[:, group], v[:, group], causal=is_causal)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, seed[0], torch.empty(0)


def flash_backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal,  # type: ignore[no-untyped-def]
                   seed, offset, *, scale=None):  # fmt: skip
    assert (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0)
    assert lse.shape == q.shape[:3]
    return backward(grad, q, k, v, out, lse, causal=is_causal)


def efficient(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):  # type: ignore[no-untyped-def]
    assert q.dtype == torch.float32 or bias is not None
    assert compute_lse
    assert dropout_p == 0
    out, lse = forward(q, k, v, causal=is_causal, bias=bias)
    padded = F.pad(lse, (0, -lse.shape[-1] % ALIGNMENT), value=math.inf)
    return out, padded, SEED.clone(), SEED.clone()


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout_p, wanted,  # type: ignore[no-untyped-def]
                       is_causal=False, *, scale=None):  # fmt: skip
    length = q.shape[2]
    assert lse.shape[-1] % ALIGNMENT == 0
    assert torch.isposinf(lse[..., length:]).all()
    assert wanted == [True, True, True, False]
    assert dropout_p == 0
    lse = lse[..., :length].contiguous()
    grads = backward(grad, q, k, v, out, lse, causal=is_causal, bias=bias)
    return *grads, torch.empty(0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_is_on_cpu", lambda x: False)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(FLASH, flash, "CPU")
        library.impl(f"{FLASH}_backward", flash_backward, "CPU")
        library.impl(EFFICIENT, efficient, "CPU")
        library.impl(f"{EFFICIENT}_backward", efficient_backward, "CPU")
        yield


def error_of(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.promise("cp")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_blocks_of_grouped_heads_are_attention_in_float64(
    kernels: None, dtype: torch.dtype, bound: float
) -> None:
    """A causal block, a complete one of another length, and one that a window cuts."""
    torch.manual_seed(0)
    length, other, cut = 24, 40, 21
    q, grad = (torch.randn(2, 4, length, 16).to(dtype) for _ in range(2))
    pairs = [[torch.randn(2, 2, n, 16).to(dtype) for _ in "kv"] for n in (length, other, cut)]
    kinds = [(True, None), (False, None), (False, (-3, 5))]
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:-1], -math.inf)
    for (k, v), (causal, band) in zip(pairs, kinds, strict=True):
        piece, piece_lse = attend(q, k, v, causal=causal, band=band)
        assert piece.dtype == dtype
        assert piece_lse.dtype == torch.float32
        assert piece_lse.shape == q.shape[:-1]
        merge(out, lse, piece_BHSD=piece, piece_lse_BHS=piece_lse)
    found = [
        attend_backward(
            grad, q, k, v, out_BHSD=out.to(dtype), lse_BHS=lse, causal=causal, band=band
        )
        for (k, v), (causal, band) in zip(pairs, kinds, strict=True)
    ]

    leaves = [x.double().requires_grad_() for x in (q, *pairs[0], *pairs[1], *pairs[2])]
    keys, values = (torch.cat(leaves[i::2], 2) for i in (1, 2))
    mask = torch.ones(length, length + other + cut, dtype=torch.bool)
    mask[:, :length] = mask[:, :length].tril()
    mask[:, -cut:] = mask[:, -cut:].tril(5).triu(-3)
    expected = F.scaled_dot_product_attention(
        leaves[0], keys, values, attn_mask=mask, enable_gqa=True
    )
    expected.backward(grad.double())
    grads = [x.grad for x in leaves]
    ours = [sum(part[0].float() for part in found), *(x for part in found for x in part[1:])]
    assert error_of(out, expected.detach()) < bound
    for one, other_one in zip(ours, grads, strict=True):
        assert other_one is not None
        assert error_of(one, other_one) < bound
