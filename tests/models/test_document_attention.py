"""Attention inside documents on one device: against each document by itself, and how it is called
on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.parallel.test_context_attention import Watch, error, in_float64, results
from torchtitan.models import attention
from torchtitan.models.attention import causal_attention, document_attention, varlen_attention
from torchtitan.models.interface import Documents

LENGTHS = ((7, 1, 22), (30,), (1, 1, 28))


def tensors(dtype: torch.dtype = torch.float32, *, num_kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (4, num_kv_heads, num_kv_heads, 4)
    return [torch.randn(3, n, 30, 16, generator=generator).to(dtype) for n in heads]


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: Tensor,
    begins_k: Tensor,
    longest: int,
    longest_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """What torch says of its kernel for sequences of different lengths, on (T, H, D)."""
    assert window_size == (-1, 0)
    assert begins is begins_k
    assert begins.dtype == torch.int32
    assert longest == longest_k == int(begins.diff().max())
    outs = [
        F.scaled_dot_product_attention(
            *(x[start:stop].transpose(0, 1) for x in (q, k, v)),
            is_causal=True,
            enable_gqa=enable_gqa,
        ).transpose(0, 1)
        for start, stop in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    ]
    return torch.cat(outs)


def without_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: Tensor,
    begins_k: Tensor,
    longest: int,
    longest_k: int,
    *,
    window_size: tuple[int, int],
) -> Tensor:
    """As in torch 2.11."""
    return varlen(q, k, v, begins, begins_k, longest, longest_k, window_size=window_size)


def assert_exact(attend: Callable[..., Tensor], given: list[Tensor]) -> None:
    documents = Documents(LENGTHS)
    ours = results(attend, given, documents)
    exact = results(in_float64, given, documents)
    assert all(error(ours[name], exact[name]) < 1e-5 for name in exact)


@pytest.mark.promise("documents")
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_document_attention(num_kv_heads: int) -> None:
    assert_exact(document_attention, tensors(num_kv_heads=num_kv_heads))
    assert_exact(causal_attention, tensors(num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("kernel", [varlen, without_groups])
def test_varlen_attention_is_told_the_same(
    kernel: Callable[..., Tensor], num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    assert_exact(varlen_attention, tensors(num_kv_heads=num_kv_heads))


@pytest.mark.promise("no-square")
@pytest.mark.parametrize("lengths", [(4096,), (4095, 1)])
def test_a_document_as_long_as_its_sequence_holds_nothing_of_its_square(
    lengths: tuple[int, ...],
) -> None:
    q = torch.randn(1, 2, 4096, 8, requires_grad=True)
    k = torch.randn(1, 1, 4096, 8, requires_grad=True)
    with Watch() as watch:
        causal_attention(q, k, k, Documents((lengths,))).sum().backward()
    assert 0 < watch.largest < 4096**2 / 64
