"""The loss against float64: itself and both gradients, in chunks, on one rank and on several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.rank_pool import RankPool
from tests.parallel.test_context_attention import Watch
from torchtitan.optim.loss import (
    IGNORE_INDEX,
    build_loss,
    count_valid,
    find_loss,
)

B, S, C, V = 2, 6, 5, 24
WEIGHT = 0.3
"""What the step loop multiplies the loss by; no power of two, so that it rounds."""
LABELS = ("some due", "none due", "none of a chunk due", "at the edges of parts")
Found = tuple[float, Tensor, Tensor]
"""The loss, and the gradients of input and weight."""


def inputs(case: str = "some due", *, shape: Sequence[int] = (B, S, C, V)) -> list[Tensor]:
    """Return the head's input, its weight and labels."""
    batch, seq_len, width, vocab = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, seq_len, width, generator=generator) * 2
    weight = torch.randn(vocab, width, generator=generator)
    labels = torch.randint(vocab, (batch, seq_len), generator=generator)
    if case == "none due":
        labels[:] = IGNORE_INDEX
    elif case == "none of a chunk due":
        labels[0] = IGNORE_INDEX
    elif case == "at the edges of parts":
        labels = torch.tensor([0, 5, 6, 11, 12, vocab - 1]).repeat(batch, 1)
    elif case == "huge":
        # exponentials overflow float32; whole numbers, so that the logits are exact
        x, weight = x.round(), (weight * 4).round() * 100
    else:
        labels[0, 2:5] = IGNORE_INDEX
    return [x, weight, labels]


def exact(x: Tensor, weight: Tensor, labels: Tensor) -> Found:
    """Return the same by plain PyTorch, in float64."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    return plain(x, weight, labels)


def plain(x: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype = torch.float64) -> Found:
    x, weight = (tensor.detach().requires_grad_() for tensor in (x, weight))
    logits = F.linear(x, weight).flatten(0, 1).to(dtype)
    summed = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    (summed * WEIGHT).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return summed.item(), x.grad, weight.grad


def computed(
    tensors: Sequence[Tensor], *, group: dist.ProcessGroup | None = None, **settings: Any
) -> Found:
    """Return the loss of ours and its gradients."""
    x, weight, labels = (tensor.clone() for tensor in tensors)
    x.requires_grad_()
    weight.requires_grad_()
    summed = build_loss(group, **settings)(x, weight, labels)
    (summed * WEIGHT).backward()
    assert summed.dtype == torch.float32
    assert torch.equal(labels, tensors[2]), "labels are read only"
    for tensor in (x, weight):
        assert tensor.grad is not None
        assert tensor.grad.dtype == tensor.dtype
    return summed.item(), x.grad, weight.grad  # type: ignore[return-value]


def assert_right(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=0)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.shape == theirs.shape
        error = (ours.double() - theirs).norm()
        assert error <= 1e-6 * theirs.norm(), error / theirs.norm()


@pytest.mark.promise("loss")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 5, B * S, 99])
@pytest.mark.parametrize("case", [*LABELS, "huge"])
def test_loss_and_gradients_equal_float64(case: str, num_chunks: int, recompute: bool) -> None:
    tensors = inputs(case)
    assert_right(computed(tensors, num_chunks=num_chunks, recompute=recompute), exact(*tensors))
    assert count_valid(tensors[2]).item() == sum(tensors[2].flatten() != IGNORE_INDEX)


@pytest.mark.promise("loss")
@pytest.mark.parametrize("case", ["some due", "none of a chunk due", "huge"])
def test_the_compiled_loss_equals_float64(case: str) -> None:
    tensors = inputs(case)
    for num_chunks in (1, 5):  # one compiled for both sizes of chunks
        found = computed(tensors, num_chunks=num_chunks, backend="inductor")
        assert_right(found, exact(*tensors))


@pytest.mark.promise("loss")
def test_in_bfloat16_the_compiled_loss_reads_the_same_logits() -> None:
    x, weight, labels = inputs(shape=LARGE)
    halves = [x.bfloat16(), weight.bfloat16(), labels]
    wanted, *gradients = computed(halves, num_chunks=7)
    found, *compiled = computed(halves, num_chunks=7, backend="inductor")
    assert found == pytest.approx(wanted, rel=1e-6, abs=0)
    for ours, theirs in zip(compiled, gradients, strict=True):
        error = (ours.double() - theirs).norm()
        assert error <= 2**-9 * theirs.norm()  # an exponential that rounds differently in a few


@pytest.mark.promise("loss")
def test_without_valid_labels_loss_and_gradients_are_zero() -> None:
    for found in (computed(inputs("none due"), num_chunks=n) for n in (1, 5)):
        assert found[0] == 0
        assert not found[1].any()
        assert not found[2].any()


# --- the vocabulary over several ranks


def on_ranks(tensors: Sequence[Tensor], **settings: Any) -> Found:
    """Return the loss, and the gradients of this rank's part of the weight, on each rank."""
    x, weight, labels = tensors
    part = weight.chunk(dist.get_world_size())[dist.get_rank()]
    return computed([x, part, labels], group=dist.group.WORLD, **settings)


def together(answers: Sequence[Found]) -> Found:
    """Sum the ranks' shares in the input's gradient, join the parts of the weight's."""
    values = {value for value, *_ in answers}
    assert len(values) == 1
    dx = torch.stack([dx.double() for _, dx, _ in answers]).sum(0)
    return values.pop(), dx, torch.cat([dweight for *_, dweight in answers])


@pytest.mark.promise("loss")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", [*LABELS, "huge"])
def test_parts_of_the_vocabulary_give_the_whole(case: str, world: int, ranks: RankPool) -> None:
    tensors = inputs(case)
    expected = exact(*tensors)
    for settings in (
        {"num_chunks": 1},
        {"num_chunks": 5},
        {"num_chunks": 3, "recompute": True},
        {"num_chunks": 3, "backend": "aot_eager"},
    ):
        answers = ranks.run(on_ranks, tensors, **settings, world=world)
        assert_right(together(answers), expected)


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_outside_the_vocabulary_is_no_silent_loss(label: int, ranks: RankPool) -> None:
    x, weight, labels = inputs()
    labels[1, 3] = label
    answers = [computed([x, weight, labels], num_chunks=3)]
    answers += ranks.run(on_ranks, [x, weight, labels], num_chunks=3, world=2)
    for value, *_ in answers:
        assert math.isnan(value)


# --- what is computed, and what is kept


class Products(Watch):
    """Counts matrix products too."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return super().__torch_dispatch__(func, types, args, kwargs)


LARGE = (1, 300, 8, 200)
"""Logits of which even a chunk is larger than input and weight."""


@pytest.mark.promise("no-square")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("recompute", "products"), [(False, (30, 0)), (True, (10, 40))])
def test_three_products_a_chunk_and_no_tensor_larger_than_its_logits(
    recompute: bool, products: tuple[int, int], dtype: torch.dtype
) -> None:
    """Recomputed, five: gradients of input and weight each from logits of their own."""
    x, weight, labels = inputs(shape=LARGE)
    x, weight = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    with Products() as forward:
        summed = build_loss(None, num_chunks=10, recompute=recompute)(x, weight, labels)
    with Products() as backward:
        (summed * WEIGHT).backward()
    assert (forward.products, backward.products) == products
    assert max(forward.largest, backward.largest) == 300 * 200 // 10


# --- the size of a chunk


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.2)


@pytest.mark.promise("nobody-forks")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 5])
@pytest.mark.parametrize("case", ["some due", "none due"])
def test_a_loss_of_the_users_own(case: str, num_chunks: int, recompute: bool) -> None:
    x, weight, labels = inputs(case)
    losses = find_loss(f"{__name__}:smoothed", {})
    built = build_loss(None, num_chunks=num_chunks, recompute=recompute, token_losses=losses)
    ends = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    summed = built(*ends, labels)
    (summed * WEIGHT).backward()
    exact_ends = [tensor.double().requires_grad_() for tensor in (x, weight)]
    logits = F.linear(*exact_ends).flatten(0, 1)
    wanted = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.2)
    (wanted * WEIGHT).backward()
    torch.testing.assert_close(summed.double(), wanted, rtol=1e-5, atol=1e-6)
    for end, right in zip(ends, exact_ends, strict=True):
        assert end.grad is not None
        torch.testing.assert_close(end.grad.double(), right.grad, rtol=1e-4, atol=1e-5)
