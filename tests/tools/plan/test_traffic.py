"""Counts against closed forms, worked out from the model's sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tools.plan.jobs import (
    BF16,
    BLOCK,
    CP2,
    EMBEDDING,
    EP2,
    FP32,
    HEAD,
    KV_DIM,
    PARAMETERS,
    PIPELINED,
    PP2,
    TP2,
    B,
    C,
    L,
    S,
    planned,
    recorded,
)
from torchtitan.mesh.dims import ParallelDims
from torchtitan.tools.plan.traffic import Row, axes_of, count_traffic

pytestmark = pytest.mark.slow

COPIES = "--parallelism.data_parallel_replicate_degree=2"
STREAM = B * S * C * BF16


def counted(
    folder: Path, *settings: str, world: int, rank: int = 0
) -> Mapping[tuple[str, str], Row]:
    job = planned(folder, *settings, world=world)
    rows = count_traffic(job, recorded(*settings, world=world, rank=rank))
    return {(row.axis, row.collective): row for row in rows}


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize(
    ("setting", "steps", "again"),
    [
        ("--debug.seed=1", 1, L - 1),
        (f"--training.global_batch_size={3 * 4 * B}", 3, L - 1),  # three are counted from two
        ("--parallelism.fsdp_reshard_after_forward=never", 1, 0),
    ],
)
def test_sharded(setting: str, steps: int, again: int, tmp_path: Path) -> None:
    """The last block and the head stay gathered, and the embedding's backward reads no weights."""
    rows = counted(tmp_path, setting, world=4)
    gathers, scatters = (rows["fsdp", name] for name in ("all-gather", "reduce-scatter"))
    assert gathers.size == steps * BF16 * (PARAMETERS + again * BLOCK)
    assert scatters.size == steps * FP32 * PARAMETERS
    if steps == 1:
        assert (gathers.calls, scatters.calls) == (L + 2 + again, L + 2)


def test_copies(tmp_path: Path) -> None:
    row = counted(tmp_path, COPIES, world=4)["dp_replicate", "all-reduce"]
    whole = FP32 * PARAMETERS / 2
    # two copies on two machines: a ring of two sends the tensor once, all of it to the other one
    assert row[2:] == (L + 2, whole, 0.0, whole)


@pytest.mark.promise("plan-formulas")
def test_tensor_parallel(tmp_path: Path) -> None:
    """With sequence parallelism a block gathers the stream twice and scatters sums of it twice,
    backward does the reverse; so do the embedding's sum and the head's gather. Without, the stream
    is summed: twice in forward, twice in backward, and for embedding and head."""
    num = 4 * L + 2
    rows = counted(tmp_path, TP2, world=2)
    for name in ("all-gather", "reduce-scatter"):
        assert (rows["tp", name].calls, rows["tp", name].size) == (num, num * STREAM)
    rows = counted(tmp_path, TP2, "--parallelism.enable_sequence_parallel=false", world=2)
    assert ("tp", "all-gather") not in rows
    of_loss = 2 * B * S * FP32  # the largest logit of each token, and a sum
    assert rows["tp", "all-reduce"].size == pytest.approx(num * STREAM + of_loss, rel=0.02)


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # forward: one gather of keys and values; backward: gathered again, and their gradients
        ("allgather", {"all-gather": 2 * L, "reduce-scatter": L}),
        # forward: one hop; backward: one hop, and two of the gradients, which go home
        ("alltoall", {"send": 4 * L}),
        # forward: there and back; backward: the same
        ("ulysses", {"all-to-all": 4 * L}),
    ],
)
def test_context_parallel(method: str, expected: Mapping[str, int], tmp_path: Path) -> None:
    setting = f"--parallelism.context_parallel_rotate_method={method}"
    rows = counted(tmp_path, CP2, setting, world=2)
    calls = {what: row.calls for (axis, what), row in rows.items() if axis == "cp"}
    assert {what: n for what, n in calls.items() if what != "receive"} == expected
    keys_and_values = 2 * B * S * KV_DIM
    if method == "allgather":
        assert rows["cp", "all-gather"].size == 2 * L * keys_and_values * BF16
    if method == "alltoall":  # half of the sequence each time
        assert rows["cp", "send"].size >= 2 * L * keys_and_values / 2 * BF16


@PIPELINED
def test_pipeline(tmp_path: Path) -> None:
    """The first rank sends each microbatch's stream, the last its gradient; each reduces once."""
    for rank, weights in ((0, EMBEDDING + 2 * BLOCK), (2, BLOCK + HEAD)):
        rows = counted(tmp_path, PP2, world=4, rank=rank)
        for name in ("send", "receive"):
            assert (rows["pp", name].calls, rows["pp", name].size) == (B, STREAM)
        assert rows["fsdp", "reduce-scatter"].size == FP32 * weights
        assert rows["fsdp", "all-gather"].size == BF16 * weights


@pytest.mark.promise("plan-formulas")
def test_experts(tmp_path: Path) -> None:
    """Five exchanges a layer: the numbers, and rows there and back, in forward and in backward.
    What shards and copies experts has groups of its own."""
    rows = counted(tmp_path, "--model.name=qwen3_moe", EP2, COPIES, world=8)
    with_experts = L - 1  # the first layer is dense
    row = rows["ep", "all-to-all"]
    assert row.calls == 5 * with_experts
    rows_sent = 4 * 2 * STREAM  # two experts for each token
    assert row.size == pytest.approx(with_experts * rows_sent, rel=0.01)
    groups = L + 2 + with_experts  # blocks, both ends, and the experts of a block
    assert rows["dp_replicate", "all-reduce"].calls == groups
    assert rows["efsdp", "reduce-scatter"].calls == with_experts


def test_where_ranks_lie() -> None:
    dims = ParallelDims(pp=2, dp_shard=4, cp=1, tp=4)
    axes = axes_of(dims, gpus_per_node=8)
    on_node = {name: axes[name].on_node for name in ("tp", "fsdp", "pp")}
    assert on_node == {"tp": 4, "fsdp": 2, "pp": 1}
    # 4 ranks on 2 machines, 2 on each: half of the tensor crosses, over both adapters
    assert axes["fsdp"].moved("all-gather", 800) == (400.0, 200.0)
    assert axes["fsdp"].moved("all-reduce", 800) == (800.0, 400.0)
    # each of 2 ranks sends a quarter to itself, one to its neighbor and two to the other machine
    assert axes["fsdp"].moved("all-to-all", 800) == (200.0, 400.0)
    assert axes["tp"].moved("all-gather", 800) == (600.0, 0.0)
    assert axes["pp"].moved("send", 800) == (0.0, 800.0)
