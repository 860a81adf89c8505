"""What memory is for and how much arithmetic there is, worked out by hand for a small Llama."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

from tests.tools.plan.jobs import placed, recorded
from torchtitan.tools.plan.account import classify, replay
from torchtitan.tools.plan.tape import Entry, Record

LAYERS, DIM, KV, HIDDEN, VOCAB, HEADS = 3, 32, 16, 96, 264, 8
BATCH, SEQUENCE = 8, 64
TOKENS = BATCH * SEQUENCE
MATRICES = 2 * DIM * DIM + 2 * DIM * KV + 3 * DIM * HIDDEN
"""Weights of a layer that multiply."""
NORMS = 2 * DIM
PARAMETERS = LAYERS * (MATRICES + NORMS) + 2 * VOCAB * DIM + DIM
TENSORS = 9 * LAYERS + 3
RECOMPUTED = "--activation_checkpoint.mode=full"


def born(found: Record, purpose: str, *, pool: str = "compute") -> int:
    """Return the bytes of all that is born for something."""
    return sum(
        entry.size
        for entry, its in zip(found.entries, classify(found), strict=True)
        if (entry.event, its, entry.pool) == ("birth", purpose, pool)
    )


def saved(found: Record, block: int) -> int:
    """Return the bytes that a block's forward leaves to its backward."""
    purposes = classify(found)
    return sum(
        found.entries[index].size
        for piece, end in found.bounds()
        if (piece.phase, piece.block) == ("forward", block)
        for index in range(piece.start, end)
        if found.entries[index].event == "birth" and purposes[index] == "activations"
    )


def left(found: Record) -> Counter[str]:
    """Return the bytes that live when the step is over."""
    live: Counter[str] = Counter()
    for entry in found.entries:
        live[entry.purpose] += {"birth": 1, "death": -1}.get(entry.event, 0) * entry.size
    return live


BATCHES = 2 * 8 * TOKENS + 8 * SEQUENCE
"""Bytes of tokens, labels and positions, which the step does not free."""


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize("arguments", [(), (RECOMPUTED,)])
def test_state_and_gradients(arguments: tuple[str, ...]) -> None:
    found = recorded(*arguments)
    assert born(found, "weights") == 4 * PARAMETERS
    assert born(found, "optimizer") == 2 * 4 * PARAMETERS + 4 * TENSORS
    assert born(found, "gradients") == 4 * PARAMETERS
    account = replay(found)
    assert account.by_purpose["weights"] == 4 * PARAMETERS
    assert account.on_host == 0
    assert sum(account.by_purpose.values()) <= account.active <= account.reserved


def test_nothing_but_state_outlives_the_step() -> None:
    found = recorded()
    assert left(found) == Counter(
        weights=4 * PARAMETERS,
        optimizer=8 * PARAMETERS + 4 * TENSORS,
        temporaries=left(found)["temporaries"],
    ) | Counter(gradients=0)
    assert left(found)["temporaries"] <= BATCHES + 64


@pytest.mark.promise("plan-formulas")
def test_what_a_block_saves() -> None:
    """By token, in bfloat16."""
    norm = 2 * DIM + 4 + 2 * DIM  # input, 1 / rms in float32, output
    attention = 2 * (DIM + KV + KV + DIM) + 4 * HEADS  # q, k, v, output, log-sum-exp
    feed_forward = 3 * 2 * HIDDEN  # w1 x, w3 x, silu(w1 x) * w3 x
    casts = 2 * (MATRICES + NORMS)  # weights in bfloat16, once for all tokens
    expected = TOKENS * (2 * norm + attention + feed_forward) + casts
    assert saved(recorded(), block=1) == expected


def test_what_a_recomputed_block_saves() -> None:
    """Its input, which the block before it makes."""
    assert saved(recorded(RECOMPUTED), block=1) == TOKENS * 2 * DIM


def test_fsdp_saves_no_casts_of_weights() -> None:
    one, sharded = recorded(), recorded(world=2)
    assert saved(one, block=1) - saved(sharded, block=1) == 2 * (MATRICES + NORMS)
    assert born(sharded, "weights") == 4 * PARAMETERS // 2


@pytest.mark.parametrize(
    ("reshard", "again"), [("default", LAYERS - 1), ("always", LAYERS), ("never", 0)]
)
def test_gathered_weights(reshard: str, again: int) -> None:
    """All once in forward, and for backward the blocks that were freed: by default not the last."""
    argument = f"--parallelism.fsdp_reshard_after_forward={reshard}"
    found = recorded(argument, world=2)
    everything, blocks = 2 * PARAMETERS, 2 * again * (MATRICES + NORMS)
    # a gather takes half of what it fills, and this is copied to where weights are used
    messages = (everything + blocks) * 3 // 2
    pools = Counter(gather=messages, compute=everything + blocks)
    for pool in ("gather", "compute"):
        assert born(found, "gathered weights", pool=pool) == pools[pool]
    gathers = [e.size for e in found.entries if e.event == "message" and "gather" in e.where[1]]
    assert sum(gathers) == everything + blocks
    scattered = [e.size for e in found.entries if e.event == "message" and "scatter" in e.where[1]]
    assert sum(scattered) == 4 * PARAMETERS


def test_passes_are_what_moves_bytes() -> None:
    """FSDP copies gathered weights to where they are used, and gradients to where they are reduced,
    in another type; new memory and views move nothing."""
    found = recorded(world=2)
    size: Counter[str] = Counter()
    for entry in found.entries:
        if entry.event == "message":
            size["gathered"] += entry.size * ("gather" in entry.where[1])
        if entry.event == "pass":
            size[entry.where[0]] += entry.size
    assert size["fsdp::split_with_sizes_copy"] == 2 * size["gathered"]
    copied = size["fsdp::chunk_cat"] + size["fsdp::chunk_cat_mixed_dtype"]
    assert copied == (2 + 4) * PARAMETERS
    assert not [name for name in size if "empty" in name or "view" in name]


def test_offloaded_state_is_on_the_host() -> None:
    found = recorded("--training.enable_cpu_offload=true", world=2)
    share = PARAMETERS // 2
    assert born(found, "weights") == born(found, "optimizer") == 0
    assert born(found, "weights", pool="host") == 4 * share
    assert born(found, "optimizer", pool="host") == 8 * share + 4 * TENSORS
    account = replay(found)
    # weights, both moments and gradients
    assert account.on_host == 16 * share + 4 * TENSORS
    assert "weights" not in account.by_purpose


@pytest.mark.promise("plan-formulas")
def test_the_peak_is_that_of_all_births_and_deaths() -> None:
    found = recorded()
    signs = {"birth": 1, "death": -1}
    live = list(accumulate(signs.get(entry.event, 0) * entry.size for entry in found.entries))
    account = replay(found)
    assert sum(account.by_purpose.values()) == max(live)
    assert account.peak == found.entries[live.index(max(live))]


def operations(found: Record, *, attention: bool) -> int:
    return sum(e.size for e in found.entries if is_product(e) and is_attention(e) == attention)


def is_product(entry: Entry) -> bool:
    return entry.event == "product"


def is_attention(entry: Entry) -> bool:
    return "attention" in entry.where[0]


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize(("arguments", "times"), [((), 3), ((RECOMPUTED,), 4)])
def test_products(arguments: tuple[str, ...], times: int) -> None:
    """Backward multiplies twice as much as forward; attention 2.5 times, for it recomputes.

    A block that is recomputed stops before its last product, which backward does not ask for.
    """
    found = recorded(*arguments)
    blocks = 2 * TOKENS * LAYERS * (times * MATRICES - (times - 3) * DIM * HIDDEN)
    assert operations(found, attention=False) == blocks + 3 * 2 * TOKENS * DIM * VOCAB
    scores = BATCH * SEQUENCE * SEQUENCE // 2  # below the diagonal
    forward = 2 * 2 * scores * DIM * LAYERS
    assert operations(found, attention=True) == forward * (times - 2) + forward * 5 // 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["alltoall", "ulysses"])
def test_context_parallel_ranks_share_the_products_of_attention(method: str) -> None:
    one = operations(recorded(), attention=True)
    arguments = (
        "--parallelism.context_parallel_degree=2",
        f"--parallelism.context_parallel_rotate_method={method}",
    )
    ranks = [recorded(*arguments, world=2, rank=rank) for rank in range(2)]
    assert sum(operations(rank, attention=True) for rank in ranks) == one


@pytest.mark.slow
def test_products_of_experts(tmp_path: Path) -> None:
    arguments = ("--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=2")
    _, layout = placed(tmp_path, *arguments, world=2)
    sizes = layout.architecture
    rows = TOKENS * sizes.num_experts_per_token  # type: ignore[attr-defined]
    expert = 3 * sizes.dim * sizes.expert_hidden_dim  # type: ignore[attr-defined]
    found = recorded(*arguments, world=2)
    grouped = sum(e.size for e in found.entries if is_product(e) and "grouped" in e.where[0])
    assert grouped == 3 * 2 * rows * expert * (LAYERS - 1)  # the first layer is dense
