"""What memory is for and how much arithmetic there is, worked out by hand for a small Llama."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path

import pytest

from tests.tools.plan.jobs import (
    BLOCK,
    CP2,
    EP2,
    KV_DIM,
    MATRICES,
    PARAMETERS,
    RECOMPUTED,
    TENSORS,
    TOKENS,
    TP2,
    B,
    C,
    F,
    H,
    L,
    S,
    V,
    planned,
    recorded,
)
from torchtitan.tools.plan.account import classify, replay
from torchtitan.tools.plan.memory import staged
from torchtitan.tools.plan.ranks import rehearse_rank
from torchtitan.tools.plan.tape import Record

SIGNS = {"birth": 1, "death": -1}
STATE = {"weights": 4 * PARAMETERS, "optimizer": 2 * 4 * PARAMETERS + 4 * TENSORS}
OFFLOADED = "--training.enable_cpu_offload=true"


def born(found: Record, purpose: str, *, pool: str = "compute") -> int:
    """Return the bytes of all that is born for something."""
    return sum(
        entry.size
        for entry, its in zip(found.entries, classify(found), strict=True)
        if (entry.event, its, entry.pool) == ("birth", purpose, pool)
    )


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize("arguments", [(), (RECOMPUTED,)])
def test_state_and_gradients(arguments: tuple[str, ...]) -> None:
    """The peak is that of all births and deaths, and state and the batch outlive the step."""
    found = recorded(*arguments)
    assert {purpose: born(found, purpose) for purpose in STATE} == STATE
    assert born(found, "gradients") == 4 * PARAMETERS
    account = replay(found)
    assert account.by_purpose["weights"] == 4 * PARAMETERS
    assert account.on_host == 0
    live = list(accumulate(SIGNS.get(entry.event, 0) * entry.size for entry in found.entries))
    assert account.peak == found.entries[live.index(max(live))]
    assert max(live) == account.by_purpose.total() <= account.active <= account.reserved
    left: Counter[str] = Counter()
    for entry in found.entries:
        left[entry.purpose] += SIGNS.get(entry.event, 0) * entry.size
    assert left.pop("temporaries") <= 2 * 8 * TOKENS + 8 * S + 64  # tokens, labels, positions
    assert left == Counter(STATE)


NORM = 2 * C + 4 + 2 * C  # input, 1 / rms in float32, output
ATTENTION = 2 * (C + 2 * KV_DIM + C) + 4 * H  # q, k, v, output, log-sum-exp
SAVED = TOKENS * (2 * NORM + ATTENTION + 3 * 2 * F)  # w1 x, w3 x, silu(w1 x) * w3 x


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize(
    ("arguments", "world", "expected"),
    [
        ((), 1, SAVED + 2 * BLOCK),  # weights in bfloat16, once for all tokens
        ((), 2, SAVED),  # FSDP gathers them in bfloat16
        ((RECOMPUTED,), 1, TOKENS * 2 * C),  # its input, which the block before it makes
    ],
)
def test_what_a_block_saves(arguments: tuple[str, ...], world: int, expected: int) -> None:
    found = recorded(*arguments, world=world)
    purposes = classify(found)
    assert expected == sum(
        found.entries[index].size
        for piece, end in found.bounds()
        if piece[1:] == ("forward", 1)
        for index in range(piece.start, end)
        if found.entries[index].event == "birth" and purposes[index] == "activations"
    )


@pytest.mark.parametrize(("reshard", "again"), [("default", L - 1), ("always", L), ("never", 0)])
def test_gathered_weights(reshard: str, again: int) -> None:
    """All once in forward, and for backward the blocks that were freed: by default not the last."""
    found = recorded(f"--parallelism.fsdp_reshard_after_forward={reshard}", world=2)
    assert born(found, "weights") == 4 * PARAMETERS // 2
    gathered = 2 * PARAMETERS + 2 * again * BLOCK
    # a gather takes half of what it fills, and this is copied to where weights are used
    assert born(found, "gathered weights", pool="gather") == gathered * 3 // 2
    assert born(found, "gathered weights") == gathered
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for entry in found.entries:
        sizes[entry.event][entry.where[entry.event == "message"]] += entry.size
    messages, passes = sizes["message"], sizes["pass"]
    assert sum(messages[name] for name in messages if "gather" in name) == gathered
    assert sum(messages[name] for name in messages if "scatter" in name) == 4 * PARAMETERS
    # copies to where weights are used, and of gradients to where they are reduced
    assert passes["fsdp::split_with_sizes_copy"] == 2 * gathered
    copied = passes["fsdp::chunk_cat"] + passes["fsdp::chunk_cat_mixed_dtype"]
    assert copied == (2 + 4) * PARAMETERS
    assert not [name for name in passes if "empty" in name or "view" in name]


def test_offloaded_state_is_on_the_host() -> None:
    found = recorded(OFFLOADED, world=2)
    share = PARAMETERS // 2
    assert [born(found, purpose) for purpose in STATE] == [0, 0]
    in_host = [born(found, purpose, pool="host") for purpose in STATE]
    assert in_host == [4 * share, 8 * share + 4 * TENSORS]
    account = replay(found)
    # weights, both moments and gradients
    assert account.on_host == 16 * share + 4 * TENSORS
    assert "weights" not in account.by_purpose


SAVES, MODE = "--checkpoint.enable=true", "--checkpoint.async_mode="
PINNED = f"{MODE}async_with_pinned_mem"
EXACT = 3 * 4 * PARAMETERS + 4
"""AdamW has two moments of each weight, and one step count is saved for all tensors."""
POWERS = 4 + 3 * (L * (2 * 4096 + 2 * 2048 + 3 * 16384 + 2 * 128) + 2 * 65536 + 128)
"""The same, each tensor in a piece of 2^n bytes."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((SAVES, f"{MODE}async"), EXACT),
        ((SAVES, PINNED), POWERS),
        ((SAVES, PINNED, OFFLOADED), EXACT),
        ((SAVES,), 0),
        ((PINNED,), 0),
    ],
)
def test_bytes_of_a_copy_to_save(settings: tuple[str, ...], expected: int, tmp_path: Path) -> None:
    """That real runs take as much is in tests/distributed/test_plan_real.py."""
    record = recorded(*(setting for setting in settings if setting == OFFLOADED))
    assert staged(planned(tmp_path, *settings), record) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "chunks", "is_head"), [(64, 0, True), (64, 2, True), (1024, 0, False)]
)
def test_a_validation_of_more_tokens_makes_the_peak(
    samples: int, chunks: int, is_head: bool, tmp_path: Path
) -> None:
    """The larger of the head, by the loss's code, and of a block, by the feed-forward's.

    A token of the head: its input, label and loss. Of a chunk beside them: logits in
    bfloat16 and float32, a label, a maximum, two sums, two losses, two masks and what the loss
    is made from. Of a block: the stream, what was added to it, its norm, three
    hidden products, and the label.
    """
    arguments = (RECOMPUTED, "--validation.enable=true", f"--training.loss_chunks={chunks}")
    job = planned(tmp_path, *arguments, f"--validation.local_batch_size={samples}")
    account = replay(rehearse_rank(job, 0))
    tokens = samples * S
    chunk = tokens // (chunks or 1) if chunks or tokens <= 2**24 // V else 512
    head = tokens * (2 * C + 8 + 4) + chunk * ((2 + 4) * V + 8 + 4 + 2 * 4 + 2 * 4 + 2 + 4)
    head += 2 * V * C  # its weight, in bfloat16
    block = tokens * (3 * 2 * C + 3 * 2 * F + 8)
    assert (head > block) == is_head
    rest = account.by_purpose.total() - sum(STATE.values()) - max(head, block)
    assert 0 <= rest < 10240  # rotations of the 64 positions, and scalars
    assert account.piece[1:] == ("validation", None if is_head else 0)


def operations(found: Record) -> Counter[str]:
    """Return the arithmetic of attention, of experts and of other products."""
    counts: Counter[str] = Counter()
    for entry in found.entries:
        kinds = [kind for kind in ("attention", "grouped") if kind in entry.where[0]]
        counts[kinds[0] if kinds else "other"] += entry.size * (entry.event == "product")
    return counts


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize(("arguments", "times"), [((), 3), ((RECOMPUTED,), 4)])
def test_products(arguments: tuple[str, ...], times: int) -> None:
    """Backward multiplies twice as much as forward; attention 2.5 times, for it recomputes.

    A block that is recomputed stops before its last product, which backward does not ask for.
    """
    blocks = 2 * TOKENS * L * (times * MATRICES - (times - 3) * C * F)
    forward = 2 * 2 * (B * S * S // 2) * C * L  # scores below the diagonal
    assert operations(recorded(*arguments)) == {
        "other": blocks + 3 * 2 * TOKENS * C * V,
        "attention": forward * (times - 2) + forward * 5 // 2,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (TP2,),
        (CP2, "--parallelism.context_parallel_rotate_method=alltoall"),
        (CP2, "--parallelism.context_parallel_rotate_method=ulysses"),
    ],
)
def test_ranks_share_the_products(settings: tuple[str, ...]) -> None:
    ranks = [operations(recorded(*settings, world=2, rank=rank)) for rank in range(2)]
    assert ranks[0]["other"] == ranks[1]["other"]
    assert ranks[0] + ranks[1] == operations(recorded())


@pytest.mark.slow
def test_products_of_experts(tmp_path: Path) -> None:
    arguments = ("--model.name=qwen3_moe", EP2)
    sizes = planned(tmp_path, *arguments, world=2).layout.architecture
    rows = TOKENS * sizes.num_experts_per_token  # type: ignore[attr-defined]
    expert = 3 * sizes.dim * sizes.expert_hidden_dim  # type: ignore[attr-defined]
    found = operations(recorded(*arguments, world=2))
    assert found["grouped"] == 3 * 2 * rows * expert * (L - 1)  # the first layer is dense
