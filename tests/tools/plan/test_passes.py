"""Bytes that operators read and write, against counts by hand and closed forms of the update and of
RMSNorm, which is a GPU's kernel in every layout."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tools.plan.jobs import FP32, PARAMETERS, RECOMPUTED, TOKENS, TP2, C, L, recorded
from torchtitan.tools.plan.tape import Tape
from torchtitan.tools.plan.world import stand_ins

N = 256
"""Bytes of each tensor below."""


def tensor() -> Tensor:
    return torch.empty(N // 4, device="meta")


def adamw(*, amsgrad: bool = False, scaled: bool = False) -> None:
    weights, gradients, means, squares, largest = ([tensor()] for _ in range(5))
    torch._fused_adamw_(
        *(weights, gradients, means, squares, largest if amsgrad else []),
        [torch.empty(0, device="meta")],
        **{"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1.0},
        amsgrad=amsgrad,
        maximize=False,
        grad_scale=torch.empty(1, device="meta") if scaled else None,
    )


SCALE = 4
"""Bytes of a scaler's factor."""
CASES: dict[str, tuple[Callable[[], object], float]] = {
    # each tensor read and each written is 1
    "a + b": (lambda: tensor() + tensor(), 3),
    "a *= 2": (lambda: tensor().mul_(2), 2),
    "a + b into c": (lambda: torch.add(tensor(), tensor(), out=tensor()), 3),
    "a becomes b": (lambda: tensor().copy_(tensor()), 2),
    "a becomes 0": (lambda: tensor().zero_(), 1),
    "lists += lists": (lambda: torch._foreach_add_([tensor()] * 2, [tensor()] * 2), 2 * 3),
    "lists + lists": (lambda: torch._foreach_add([tensor()] * 2, [tensor()] * 2), 2 * 3),
    "lists become lists": (lambda: torch._foreach_copy_([tensor()], [tensor()]), 2),
    "two results": (lambda: torch.frexp(tensor()), 1 + 1 + 1),
    "a view": (lambda: tensor().view(8, -1).T, 0),
    "memory not written": (lambda: torch.empty_like(tensor()), 0),
    "a list in a row": (
        lambda: torch._chunk_cat([tensor()] * 2, 0, 2, out=torch.empty(2, N // 4, device="meta")),
        2 + 2,
    ),
    "AdamW": (adamw, 7),
    "AdamW, amsgrad": (lambda: adamw(amsgrad=True), 9),
    "AdamW, gradients unscaled": (lambda: adamw(scaled=True), 8 + SCALE / N),
}


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name: str) -> None:
    work, expected = CASES[name]
    with (tape := Tape({})):
        work()
    assert sum(e.size for e in tape.record.entries if e.event == "pass") == expected * N


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_the_update(world: int) -> None:
    """AdamW reads weights, gradients and both states and writes all but gradients; clipping reads
    and writes gradients, and their norm reads them."""
    found: Counter[str] = Counter()
    for entry in recorded(world=world).of_phase("update"):
        found[entry.where[0].split(".")[0]] += entry.size * (entry.event == "pass")
    weights = FP32 * PARAMETERS / world
    assert found["aten::_fused_adamw_"] == pytest.approx(7 * weights, rel=0.01)
    assert found["aten::_foreach_mul_"] == pytest.approx(2 * weights, rel=0.01)
    assert found["aten::_foreach_norm"] == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize(
    ("columns", "expected"), [(1, ("pass", 2 * (24 + 8) + 4 * 6)), (5, ("product", 240))]
)
def test_only_a_product_with_vectors_is_a_pass(columns: int, expected: tuple[str, int]) -> None:
    factors = torch.empty(2, 3, 4, device="meta"), torch.empty(2, 4, columns, device="meta")
    with (tape := Tape({})):
        torch.ops.aten.bmm.dtype(*(x.bfloat16() for x in factors), torch.float32)
    entry = next(e for e in reversed(tape.record.entries) if e.event in ("pass", "product"))
    assert (entry.event, entry.size) == expected


FORWARD, BACKWARD = "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"
COPIED = "--parallelism.enable_sequence_parallel=false"
BY_OPERATOR = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
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
    """The kernel reads the input and the weight and writes the result and, for each row, one over
    the root mean square in float32. Backward gets the input, the weight and that number."""
    found = recorded(*arguments, world=world)
    rows, weight, root = 2 * C * num_rows, 2 * C, 4 * num_rows
    for module in ("attention_norm", "ffn_norm"):
        sizes: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        for entry in found.entries:
            if entry.where[1] == module:
                sizes[entry.event, entry.where[0]][entry.size] += 1
        calls = times * L
        assert sizes["birth", FORWARD] == {rows: calls, root: calls}
        assert sizes["pass", FORWARD] == {2 * rows + weight + root: calls}
        copies = [key for key in sizes if key[0] == "birth" and 2 * rows in sizes[key]]
        assert copies == [], "of the stream, in float32"
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
