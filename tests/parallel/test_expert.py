"""Rows that travel to their experts and back, and by what they are multiplied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtitan.models.moe import multiply_grouped, multiply_per_expert

E, C, H = 5, 16, 8


def multiplied(compute, counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(counts), C), (E, H, C), (E, C, H), (E, H, C)]
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    x, *weights = [tensor.requires_grad_() for tensor in drawn]
    out = compute(x, torch.tensor(counts), weights)
    # gradients that are not expanded: the kernel takes no others
    gradients = torch.autograd.grad(out, [x, *weights], torch.full_like(out, 0.5))
    return [out.detach(), *gradients]


@pytest.mark.promise("ep")
@pytest.mark.parametrize("counts", [[3, 1, 4, 1, 5], [0, 7, 0, 0, 2], [0, 0, 0, 9, 0], [0] * E])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_each_expert(counts: list[int], dtype: torch.dtype) -> None:
    """To rounding: some kernels add in another order where an expert has few rows."""
    found = multiplied(multiply_grouped, counts, dtype)
    expected = multiplied(multiply_per_expert, counts, dtype)
    exact = multiplied(multiply_per_expert, counts, torch.float64)
    for one, other, truth in zip(found, expected, exact, strict=True):
        scale = truth.abs().max() if truth.numel() else truth.sum()
        tolerance = 1e-6 if dtype == torch.float32 else 2**-6
        torch.testing.assert_close(one, other, rtol=0, atol=float(tolerance * scale))
        torch.testing.assert_close(one.double(), truth, rtol=0, atol=float(4 * tolerance * scale))


@pytest.mark.parametrize("limit", [1, 3, 9, 100])
def test_too_many_rows_are_multiplied_in_parts(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that begin and end within experts, and a limit that is not reached."""
    counts, sizes = [0, 7, 1, 0, 2], []
    expected = multiplied(multiply_per_expert, counts, torch.float32)
    grouped_mm = torch.nn.functional.grouped_mm

    def multiply(x: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
        sizes.append(len(x))
        return grouped_mm(x, w, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", multiply)
    monkeypatch.setattr("torchtitan.models.moe.MAX_ELEMENTS", limit * C)
    for one, other in zip(
        multiplied(multiply_grouped, counts, torch.float32), expected, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert max(sizes) == min(limit, sum(counts))
    assert sum(sizes) == 3 * sum(counts)


def test_garbage_of_the_kernel_reaches_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell's kernel leaves what it found in memory in gradients of experts without rows."""
    counts = [0, 7, 0, 0, 2]
    expected = multiplied(multiply_grouped, counts, torch.bfloat16)
    grouped_mm = torch.nn.functional.grouped_mm

    def leave_garbage(grad: Tensor) -> Tensor:
        return grad.masked_fill((torch.tensor(counts) == 0)[:, None, None], torch.nan)

    def multiply(x: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
        w = w.view_as(w)
        w.register_hook(leave_garbage)
        return grouped_mm(x, w, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", multiply)
    assert multiplied(multiply_grouped, counts, torch.bfloat16)[2].isnan().any()
    monkeypatch.setattr("torchtitan.models.moe._leaves_garbage", lambda device: True)
    for one, other in zip(
        multiplied(multiply_grouped, counts, torch.bfloat16), expected, strict=True
    ):
        assert torch.equal(one, other)


def test_experts_without_rows_have_gradients_of_zero() -> None:
    _, dx, *gradients = multiplied(multiply_per_expert, [0, 7, 0, 0, 2], torch.float64)
    assert dx.abs().min() > 0
    for gradient in gradients:
        assert [bool(one.any()) for one in gradient] == [False, True, False, False, True]
