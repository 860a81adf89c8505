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
from torchtitan.base.errors import ConfigError
from torchtitan.optim.loss import (
    IGNORE_INDEX,
    build_loss,
    chunk_size,
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
def test_without_valid_labels_loss_and_gradients_are_zero() -> None:
    for found in (computed(inputs("none due"), num_chunks=n) for n in (1, 5)):
        assert found[0] == 0
        assert not found[1].any()
        assert not found[2].any()


@pytest.mark.parametrize("num_chunks", [1, 3, 128])
def test_bfloat16_is_as_exact_as_of_whole_logits(num_chunks: int) -> None:
    """Sums in bfloat16 would show in the gradient of the weight of many chunks."""
    *ends, labels = inputs(shape=(1, 512, 64, 96))
    tensors = [*(end.bfloat16() / 2 for end in ends), labels]
    expected = exact(*tensors)
    errors = []
    found = computed(tensors, num_chunks=num_chunks)
    for result in (found, plain(*tensors, dtype=torch.float32)):
        assert result[0] == pytest.approx(expected[0], rel=1e-4)
        pairs = zip(result[1:], expected[1:], strict=True)
        errors.append([((ours.double() - e).norm() / e.norm()).item() for ours, e in pairs])
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 1.05 * theirs, errors


# --- the vocabulary over several ranks


def on_ranks(tensors: Sequence[Tensor], *, group_size: int | None = None, **settings: Any) -> Found:
    """Return the loss, and the gradients of this rank's part of the weight, on each rank."""
    group = dist.group.WORLD
    if group_size is not None:  # the parts of the first ranks and of the last ones, as with dp 2
        parts = dist.get_world_size() // group_size
        groups = [
            dist.new_group(list(range(i * group_size, (i + 1) * group_size))) for i in range(parts)
        ]
        group = groups[dist.get_rank() // group_size]
    x, weight, labels = tensors
    part = weight.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    return computed([x, part, labels], group=group, **settings)


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
    for settings in ({"num_chunks": 1}, {"num_chunks": 5}, {"num_chunks": 3, "recompute": True}):
        answers = ranks.run(on_ranks, tensors, **settings, world=world)
        assert_right(together(answers), expected)


def test_groups_of_ranks_have_losses_of_their_own(ranks: RankPool) -> None:
    tensors = inputs()
    answers = ranks.run(on_ranks, tensors, group_size=2, num_chunks=5, world=4)
    for pair in (answers[:2], answers[2:]):
        assert_right(together(pair), exact(*tensors))


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


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_that_nobody_wants_are_not_computed(recompute: bool) -> None:
    x, weight, labels = inputs()
    for wants_x, wants_weight, products in (
        (False, False, 3),
        (True, False, 9 if recompute else 6),
        (False, True, 9 if recompute else 6),
    ):
        x.requires_grad_(wants_x)
        weight.requires_grad_(wants_weight)
        with Products() as watch:
            summed = build_loss(None, num_chunks=3, recompute=recompute)(x, weight, labels)
            if summed.requires_grad:
                summed.backward()
        assert watch.products == products
        assert (x.grad is not None, weight.grad is not None) == (wants_x, wants_weight)
        x.grad = weight.grad = None
    x.requires_grad_()
    weight.requires_grad_()
    with torch.no_grad(), Products() as watch:
        evaluated = build_loss(None, num_chunks=3, recompute=recompute)(x, weight, labels)
    assert watch.products == 3
    assert not evaluated.requires_grad
    assert evaluated.item() == pytest.approx(exact(x, weight, labels)[0], rel=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_kept_for_backward_is_as_much_as_input_and_weight(recompute: bool) -> None:
    x, weight, labels = inputs(shape=LARGE)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x.requires_grad_()
    weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        build_loss(None, num_chunks=10, recompute=recompute)(x, weight, labels)
    labels_too = labels.nbytes if recompute else 0
    assert sum(storages.values()) == x.nbytes + weight.nbytes + labels_too


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_input_and_weight_may_be_asked_for_apart(recompute: bool) -> None:
    """As by schedules that halve the backward; a second time is refused, not silently wrong."""
    tensors = inputs()
    x, weight = (tensor.requires_grad_() for tensor in tensors[:2])
    summed = build_loss(None, num_chunks=3, recompute=recompute)(*tensors)
    scaled = summed * WEIGHT
    [dx] = torch.autograd.grad(scaled, x, retain_graph=True)
    [dweight] = torch.autograd.grad(scaled, weight, retain_graph=True)
    assert_right((summed.item(), dx, dweight), exact(*tensors))
    if not recompute:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(scaled, weight)


# --- the size of a chunk


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "width", "size"),
    [
        (8192, 128256, 512, 512),  # a 16th
        (8192, 128256, 4096, 512),
        (65536, 128256, 8192, 4096),
        (131072, 128256, 4096, 4096),  # as large as the weight
        (131072, 128256, 64, 512),  # the fewest
        (1024, 128256, 4096, 512),
        (300, 128256, 4096, 300),
        (8192, 2048, 256, 8192),  # few logits
        (16384, 2048, 256, 512),
    ],
)
def test_size_of_a_chunk(num_tokens: int, vocab_size: int, width: int, size: int) -> None:
    assert chunk_size(num_tokens, vocab_size, width=width) == size
    on_gpu = min(num_tokens, max(size, 2048))
    assert chunk_size(num_tokens, vocab_size, width=width, device_type="cuda") == on_gpu
    assert chunk_size(num_tokens, vocab_size, width=width, num_chunks=1) == num_tokens


def crossed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.2)


def one_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return crossed(logits, labels).sum()


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


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = crossed(logits, labels)
    return (1 - (-losses).exp()) ** 0.5 * losses


def test_what_a_loss_makes_of_tokens_without_one_is_left_out() -> None:
    """Of a token whose label is certain the gradient of this one is infinite."""
    x, weight = torch.ones(1, 2, 1), torch.tensor([[200.0], [0.0]])
    ends = [tensor.requires_grad_() for tensor in (x, weight)]
    build_loss(None, token_losses=focal)(*ends, torch.tensor([[-100, 1]])).backward()
    assert all(end.grad is not None and end.grad.isfinite().all() for end in ends)


def test_cross_entropy_as_ones_own_is_ours() -> None:
    x, weight, labels = inputs()
    built = [build_loss(None, token_losses=losses) for losses in (None, crossed)]
    ours, theirs = (loss(x, weight, labels) for loss in built)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


class OfASection:
    def __init__(self, z_loss: object) -> None: ...


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("V", "got "),
        ("crosed", "did you mean 'crossed'"),
        ("OfASection", "OfASection"),
    ],
)
def test_a_loss_that_is_none(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_loss(f"{__name__}:{name}", {})
    assert "training.loss" in error.value.mistakes[0].keys  # type: ignore[union-attr]
    assert said in str(error.value)


def test_a_sum_is_not_taken_for_the_loss_of_each_token() -> None:
    x, weight, labels = inputs()
    with pytest.raises(ConfigError, match=r"training\] loss"):
        build_loss(None, token_losses=one_sum)(x, weight, labels)
