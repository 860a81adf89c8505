"""Rows that travel to their experts and back, and by what they are multiplied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtitan.models import moe
from torchtitan.models.families import MODELS
from torchtitan.models.moe import (
    Experts,
    multiply_grouped,
    multiply_grouped_on_blackwell,
    multiply_per_expert,
)
from torchtitan.parallel.expert import (
    _order_by_expert,
    apply_grouped_products,
    why_not_grouped,
)

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


@pytest.mark.parametrize("most", [1, 2, 3, 4, 8, 9])
def test_more_rows_than_a_kernel_takes_are_multiplied_in_parts(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts end within experts, at their ends, and without a row of some."""
    counts = [0, 3, 1, 0, 5]
    monkeypatch.setattr(moe, "MOST_ELEMENTS", most * C)
    called, kernel = [], moe.F.grouped_mm
    monkeypatch.setattr(
        moe.F, "grouped_mm", lambda x, w, offs: called.append(len(x)) or kernel(x, w, offs=offs)
    )
    found = multiplied(multiply_grouped, counts, torch.float32)
    assert max(called) == min(most, 9)
    assert sum(called) == 3 * 9
    expected = multiplied(multiply_per_expert, counts, torch.float64)
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.double(), exact, rtol=0, atol=2e-6 * float(exact.abs().max())
        )


def test_blackwell_s_gradients_of_experts_without_rows_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel leaves them as they are in memory, here not a number."""
    counts, kernel = [0, 7, 0, 0, 2], moe.F.grouped_mm

    def broken(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        w = w.view_as(w)
        w.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0, 2, 3]), float("nan")))
        return kernel(x, w, offs=offs)

    expected = multiplied(multiply_grouped, counts, torch.float32)
    monkeypatch.setattr(moe.F, "grouped_mm", broken)
    assert any(t.isnan().any() for t in multiplied(multiply_grouped, counts, torch.float32))
    found = multiplied(multiply_grouped_on_blackwell, counts, torch.float32)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("capability", "compute"),
    [
        ((8, 9), multiply_per_expert),
        ((9, 0), multiply_grouped),
        ((10, 3), multiply_grouped_on_blackwell),
        ((12, 0), multiply_per_expert),
    ],
)
def test_a_gpu_has_the_products_of_its_generation(
    capability: tuple[int, int], compute: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    experts = Experts(MODELS["qwen3_moe"].flavors["tiny8"])
    apply_grouped_products(experts, device_type="cuda", dtype=torch.bfloat16)
    assert experts.compute is compute


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
