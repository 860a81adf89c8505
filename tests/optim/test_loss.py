"""The loss against a float64 loop over tokens."""

from __future__ import annotations

import math

import torch

from torchtitan.optim.loss import IGNORE_INDEX, count_valid, cross_entropy_sum


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
