"""Attention inside documents on one device: against each document by itself, and how it is called
on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def test_torch_takes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward without memory; which kernel runs is decided on a GPU that is none."""
    q, k, v, _ = (x.to("meta").requires_grad_() for x in tensors(torch.bfloat16))
    out = varlen_attention(q, k, v, Documents(LENGTHS))
    out.sum().backward()
    assert out.shape == q.shape
    assert k.grad is not None
    assert k.grad.shape == k.shape
    # page-locked memory, and autograd, want a real device's driver
    monkeypatch.setattr(
        attention, "to_device", lambda values, device: torch.tensor(values, device=device)
    )
    # torch 2.15 would ask the device, which is none, whether it can do cuDNN's
    flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    with flash, FakeTensorMode(), torch.no_grad():
        given = [torch.empty(3, n, 30, 16, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2)]
        out = causal_attention(*given, Documents(LENGTHS))
    assert (out.device.type, out.shape, out.dtype) == ("cuda", given[0].shape, torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "width", "kernel"),
    [
        (torch.bfloat16, 16, "varlen_attention"),
        (torch.float16, 64, "varlen_attention"),
        (torch.float32, 16, "document_attention"),
        (torch.bfloat16, 12, "document_attention"),
    ],
)
def test_which_way_on_a_gpu(
    dtype: torch.dtype, width: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for name in ("varlen_attention", "document_attention"):
        monkeypatch.setattr(attention, name, lambda *_, name=name: taken.append(name))
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(3, 4, 30, width, device="cuda", dtype=dtype)
        causal_attention(q, q, q, Documents(LENGTHS))
    assert taken == [kernel]


def test_no_gradient_of_a_document_is_as_long_as_the_sequence() -> None:
    """A thousand documents make no thousand tensors of S tokens."""
    q, k, v, grad = (torch.randn(1, 2, 2000, 8) for _ in range(4))
    documents = Documents(((2,) * 1000,))
    q.requires_grad_()
    sizes = []

    class Sizes(Watch):
        def __torch_dispatch__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            result = super().__torch_dispatch__(*args, **kwargs)
            if isinstance(result, Tensor):
                sizes.append(result.numel())
            return result

    with Sizes():
        causal_attention(q, k, v, documents).backward(grad)
    assert sum(size == q.numel() for size in sizes) < 20


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
