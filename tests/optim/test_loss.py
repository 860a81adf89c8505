"""The loss against a float64 loop over tokens, and in parts against torch's own in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.rank_pool import RankPool
from torchtitan.optim.loss import (
    IGNORE_INDEX,
    count_valid,
    cross_entropy_sum,
    split_cross_entropy_sum,
)


def test_sum_over_valid_tokens_equals_a_float64_loop() -> None:
    torch.manual_seed(1)
    logits, labels = torch.randn(3, 5, 11) * 4, torch.randint(11, (3, 5))
    labels[0, 2:] = IGNORE_INDEX
    expected = 0.0
    for b in range(3):
        for s in range(5):
            if labels[b, s] != IGNORE_INDEX:
                row = logits[b, s].double()
                expected -= row[labels[b, s]].item() - math.log(row.exp().sum().item())
    assert math.isclose(cross_entropy_sum(logits, labels).item(), expected, rel_tol=1e-6)
    assert count_valid(labels).item() == 12


def test_a_batch_without_valid_labels_gives_zero_loss_and_zero_gradient() -> None:
    logits = torch.randn(1, 4, 7, requires_grad=True)
    labels = torch.full((1, 4), IGNORE_INDEX)
    loss = cross_entropy_sum(logits, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 512, 16).bfloat16()
    labels = torch.randint(16, (1, 512))
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, cross_entropy_sum(logits.float(), labels), rtol=1e-6, atol=0)


def test_labels_are_read_only() -> None:
    labels = torch.tensor([[1, IGNORE_INDEX, 2]])
    before = labels.clone()
    cross_entropy_sum(torch.randn(1, 3, 4), labels)
    count_valid(labels)
    assert torch.equal(labels, before)


B, S, V = 2, 6, 24
WEIGHT = 0.125
"""What the step loop multiplies the loss by."""


def labels_of(case: str) -> Tensor:
    labels = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(2))
    if case == "none due":
        return torch.full((B, S), IGNORE_INDEX)
    if case == "at the edges of parts":
        return torch.tensor([0, 5, 6, 11, 12, V - 1]).repeat(B, 1)
    labels[0, 2:5] = IGNORE_INDEX
    return labels


def logits_of(case: str) -> Tensor:
    logits = torch.randn(B, S, V, generator=torch.Generator().manual_seed(1)) * 4
    if case == "huge":
        # exponentials overflow float32, in a part by itself, and only one part has the largest
        logits = logits * 100 + torch.linspace(-1e4, 1e4, V)
    return logits


def part_of_loss(
    logits: Tensor, labels: Tensor, *, group_size: int | None = None
) -> tuple[float, Tensor]:
    """Return the loss and this rank's part of the gradient from its part of the logits."""
    group = dist.group.WORLD
    if group_size is not None:  # the parts of the first ranks and of the last ones, as with dp 2
        parts = dist.get_world_size() // group_size
        groups = [
            dist.new_group(list(range(i * group_size, (i + 1) * group_size))) for i in range(parts)
        ]
        group = groups[dist.get_rank() // group_size]
    local = logits.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)]
    local = local.clone().requires_grad_()
    before = labels.clone()
    loss = (
        cross_entropy_sum(local, labels)
        if group is None
        else split_cross_entropy_sum(local, labels, group=group)
    )
    (loss * WEIGHT).backward()
    assert torch.equal(labels, before)
    assert loss.dtype == torch.float32
    assert local.grad is not None
    assert local.grad.dtype == logits.dtype
    return loss.item(), local.grad


def exact(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    logits = logits.double().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss * WEIGHT).backward()
    assert logits.grad is not None
    return loss.item(), logits.grad


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("logits_case", "labels_case"),
    [
        ("ordinary", "some due"),
        ("ordinary", "none due"),
        ("ordinary", "at the edges of parts"),
        ("huge", "some due"),
        ("huge", "at the edges of parts"),
    ],
)
def test_parts_of_the_vocabulary_give_the_whole_loss(
    logits_case: str, labels_case: str, world: int, ranks: RankPool
) -> None:
    logits, labels = logits_of(logits_case), labels_of(labels_case)
    loss, grad = exact(logits, labels)
    answers = ranks.run(part_of_loss, logits, labels, world=world)
    for value, _ in answers:
        assert value == pytest.approx(loss, rel=1e-6, abs=0)
    together = torch.cat([part for _, part in answers], -1).double()
    torch.testing.assert_close(together, grad, rtol=0, atol=2e-7)


def test_groups_of_ranks_have_losses_of_their_own(ranks: RankPool) -> None:
    logits, labels = logits_of("ordinary"), labels_of("some due")
    loss, grad = exact(logits, labels)
    answers = ranks.run(part_of_loss, logits, labels, group_size=2, world=4)
    for value, _ in answers:
        assert value == pytest.approx(loss, rel=1e-6)
    for pair in (answers[:2], answers[2:]):
        together = torch.cat([part for _, part in pair], -1).double()
        torch.testing.assert_close(together, grad, rtol=0, atol=2e-7)


def test_parts_in_bfloat16_are_summed_in_float32(ranks: RankPool) -> None:
    logits, labels = logits_of("ordinary").bfloat16(), labels_of("some due")
    loss, grad = exact(logits, labels)
    answers = ranks.run(part_of_loss, logits, labels, world=2)
    assert answers[0][0] == pytest.approx(loss, rel=1e-6)
    together = torch.cat([part for _, part in answers], -1).double()
    torch.testing.assert_close(together, grad, rtol=2**-8, atol=1e-7)


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_outside_the_vocabulary_is_no_silent_loss(label: int, ranks: RankPool) -> None:
    labels = labels_of("some due")
    labels[1, 3] = label
    for value, _ in ranks.run(part_of_loss, logits_of("ordinary"), labels, world=2):
        assert math.isnan(value)


def test_of_the_forward_pass_the_logits_alone_are_kept(ranks: RankPool) -> None:
    """No float32 copy of bfloat16 logits, and nothing of the other ranks' parts."""
    for kept in ranks.run(kept_for_backward, world=2):
        assert kept < 2 * B * S * MANY + 64 * B * S


MANY = 1000


def kept_for_backward() -> int:
    """Return the bytes that autograd keeps, the logits included."""
    local = torch.randn(B, S, MANY).bfloat16().requires_grad_()
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        split_cross_entropy_sum(local, labels_of("some due"), group=dist.group.WORLD)
    return sum(storages.values())
