"""What a rehearsed RMSNorm keeps and moves: that of a GPU's kernel, in every layout.

The kernel reads the input and the weight and writes the result and, for each row, one over the root
mean square in float32. Backward gets the input, the weight and that number, and no copies.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tools.plan.jobs import RECOMPUTED, TOKENS, TP2, C, L, recorded
from torchtitan.tools.plan.tape import Record, Tape
from torchtitan.tools.plan.world import stand_ins

FORWARD, BACKWARD = "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"
COPIED = "--parallelism.enable_sequence_parallel=false"
BY_OPERATOR = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)


def sizes(found: Record, what: str, operator: str, module: str) -> Counter[int]:
    """Return how often so many bytes are born or passed by an operator of a norm."""
    return Counter(
        e.size for e in found.entries if e[0] == what and e.where[:2] == (operator, module)
    )


@pytest.mark.parametrize(
    ("arguments", "world", "num_rows", "times"),
    [
        ((), 1, TOKENS, 1),
        ((), 2, TOKENS, 1),
        ((TP2,), 2, TOKENS // 2, 1),
        ((TP2, COPIED), 2, TOKENS, 1),
        ((RECOMPUTED,), 1, TOKENS, 2),
        (BY_OPERATOR, 2, TOKENS, 2),
    ],
)
def test_norms_of_the_stream(
    arguments: tuple[str, ...], world: int, num_rows: int, times: int
) -> None:
    found = recorded(*arguments, world=world)
    rows, weight, root = 2 * C * num_rows, 2 * C, 4 * num_rows
    for module in ("attention_norm", "ffn_norm"):
        calls = times * L
        assert sizes(found, "birth", FORWARD, module) == {rows: calls, root: calls}
        assert sizes(found, "pass", FORWARD, module) == {2 * rows + weight + root: calls}
        assert not any(
            e.size == 2 * rows and e.where[1] == module for e in found.entries if e[0] == "birth"
        ), "a float32 copy of the stream"
    norms = 2 * L + 1
    backwards = [e for e in found.entries if e.where[0] == BACKWARD]
    passed = Counter(e.size for e in backwards if e.event == "pass")
    assert passed == {3 * rows + 2 * weight + root: norms}
    born = Counter(e.size for e in backwards if e.event == "birth")
    assert born == {rows: norms, weight: norms}


def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = F.rms_norm(x, weight.shape, weight, 1e-5)
    return y.detach(), *torch.autograd.grad(y, (x, weight), torch.full_like(y, 0.5))


def test_real_norms_are_computed_as_ever() -> None:
    x = torch.randn(3, 5, C, requires_grad=True)
    weight = torch.randn(C, requires_grad=True)
    before, tape = norm(x, weight), Tape({})
    with stand_ins(tape), tape:
        rehearsed = norm(x, weight)
    for mine, its in zip(rehearsed, before, strict=True):
        torch.testing.assert_close(mine, its)
    assert FORWARD in {e.where[0] for e in tape.record.entries}
    with (plain := Tape({})):  # afterwards this process computes as it did
        after = norm(x, weight)
    assert all(torch.equal(mine, its) for mine, its in zip(after, before, strict=True))
    assert FORWARD not in {e.where[0] for e in plain.record.entries}
