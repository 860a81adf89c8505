"""Rows that travel to their experts and back, and by what they are multiplied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtitan.models.moe import _leaves_garbage, multiply_grouped, multiply_per_expert
from torchtitan.parallel.expert import _order_by_expert, why_not_grouped

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


@pytest.mark.parametrize(("major", "groups"), [(8, False), (9, True), (10, True), (12, False)])
def test_grouped_products_have_kernels_for_two_capabilities(
    major: int, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    assert (why_not_grouped([64], device_type="cuda", dtype=torch.bfloat16) == "") is groups
    assert _leaves_garbage(torch.device("cuda")) is (major == 10)
    assert not _leaves_garbage(torch.device("cpu"))


def test_experts_without_rows_have_gradients_of_zero() -> None:
    _, dx, *gradients = multiplied(multiply_per_expert, [0, 7, 0, 0, 2], torch.float64)
    assert dx.abs().min() > 0
    for gradient in gradients:
        assert [bool(one.any()) for one in gradient] == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("sizes", "device", "dtype", "said"),
    [
        ([C, H], "cpu", torch.float32, ""),
        ([C, H], "cpu", torch.bfloat16, ""),
        ([C, H], "cpu", torch.float64, "float64"),
        ([C, 6], "cpu", torch.float32, "24"),
        ([C, 12], "cpu", torch.bfloat16, "24"),
        ([C, H], "cuda", torch.float32, "float32"),
    ],
)
def test_where_products_are_grouped(
    sizes: list[int], device: str, dtype: torch.dtype, said: str
) -> None:
    obstacle = why_not_grouped(sizes, device_type=device, dtype=dtype)
    assert said in obstacle
    assert bool(said) == bool(obstacle)


def test_rows_are_ordered_by_expert_and_then_by_rank() -> None:
    came = torch.tensor([[2, 0, 1], [1, 1, 0], [0, 2, 1]])
    # as they come: rank 0 sends a a c, rank 1 a b, rank 2 b b c
    order = _order_by_expert(came, num_rows=8).tolist()
    assert order == [0, 1, 3, 4, 5, 6, 2, 7]
