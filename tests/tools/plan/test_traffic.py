"""Counts against closed forms, worked out from the model's sizes alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.tools.plan.jobs import planned, recorded
from torchtitan.mesh.dims import ParallelDims
from torchtitan.tools.plan.traffic import Row, axes_of, count_traffic

pytestmark = pytest.mark.slow

L, C, H, KV, F, V = 3, 32, 8, 4, 96, 264
B, S = 8, 64
D = C // H
BLOCK = C * C * 2 + 2 * C * KV * D + 3 * C * F + 2 * C
EMBEDDING, HEAD = V * C, V * C + C
BF16, FP32 = 2, 4

P = "--parallelism."
TP2, CP2, PP2 = (f"{P}{name}_parallel_degree=2" for name in ("tensor", "context", "pipeline"))


def counted(
    folder: Path, *settings: str, world: int, rank: int = 0
) -> Mapping[tuple[str, str], Row]:
    job = planned(folder, *settings, world=world)
    rows = count_traffic(job, recorded(*settings, world=world, rank=rank))
    return {(row.axis, row.collective): row for row in rows}


def sizes(rows: Mapping[tuple[str, str], Row]) -> dict[tuple[str, str], tuple[float, float]]:
    return {key: (row.calls, row.size) for key, row in rows.items()}


@pytest.mark.promise("plan-formulas")
def test_sharded(tmp_path: Path) -> None:
    """The last block and the head stay gathered, and the embedding's backward reads no weights."""
    found = sizes(counted(tmp_path, world=4))
    gathered = EMBEDDING + HEAD + (2 * L - 1) * BLOCK
    assert found["fsdp", "all-gather"] == (2 * L + 1, BF16 * gathered)
    assert found["fsdp", "reduce-scatter"] == (L + 2, FP32 * (EMBEDDING + HEAD + L * BLOCK))


def test_accumulation_gathers_and_reduces_each_time(tmp_path: Path) -> None:
    """Three are counted from two."""
    found = sizes(counted(tmp_path, f"--training.global_batch_size={3 * 4 * B}", world=4))
    gathered = EMBEDDING + HEAD + (2 * L - 1) * BLOCK
    assert found["fsdp", "all-gather"][1] == 3 * BF16 * gathered
    assert found["fsdp", "reduce-scatter"][1] == 3 * FP32 * (EMBEDDING + HEAD + L * BLOCK)


def test_never_freed(tmp_path: Path) -> None:
    found = sizes(counted(tmp_path, f"{P}fsdp_reshard_after_forward=never", world=4))
    assert found["fsdp", "all-gather"] == (L + 2, BF16 * (EMBEDDING + HEAD + L * BLOCK))


def test_copies(tmp_path: Path) -> None:
    rows = counted(tmp_path, f"{P}data_parallel_replicate_degree=2", world=4)
    row = rows["dp_replicate", "all-reduce"]
    whole = FP32 * (EMBEDDING + HEAD + L * BLOCK) / 2
    assert (row.calls, row.size) == (L + 2, whole)
    # two copies on two machines: a ring of two sends the tensor once, all of it to the other one
    assert (row.on_node, row.off_node) == (0.0, whole)


@pytest.mark.promise("plan-formulas")
def test_tensor_and_sequence_parallel(tmp_path: Path) -> None:
    """A block gathers the stream twice and scatters sums of it twice, backward does the reverse;
    so do the embedding's sum and the head's gather."""
    found = sizes(counted(tmp_path, TP2, world=2))
    stream = B * S * C * BF16
    num = 4 * L + 2
    assert found["tp", "all-gather"] == (num, num * stream)
    assert found["tp", "reduce-scatter"] == (num, num * stream)


def test_tensor_parallel_without_sequence_parallel(tmp_path: Path) -> None:
    """Two sums of the stream in forward, two in backward, and those of embedding and head."""
    rows = counted(tmp_path, TP2, f"{P}enable_sequence_parallel=false", world=2)
    stream = B * S * C * BF16
    assert ("tp", "all-gather") not in rows
    logits_and_norm = 2 * B * S * FP32  # the loss: the largest logit of each token, and a sum
    assert rows["tp", "all-reduce"].size == pytest.approx(
        (4 * L + 2) * stream + logits_and_norm, rel=0.02
    )


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
    rows = counted(tmp_path, CP2, f"{P}context_parallel_rotate_method={method}", world=2)
    calls = {what: row.calls for (axis, what), row in rows.items() if axis == "cp"}
    assert {what: n for what, n in calls.items() if what != "receive"} == expected
    keys_and_values = 2 * B * S * KV * D
    if method == "allgather":
        assert rows["cp", "all-gather"].size == 2 * L * keys_and_values * BF16
    if method == "alltoall":  # half of the sequence each time
        assert rows["cp", "send"].size >= 2 * L * keys_and_values / 2 * BF16


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 12), reason="its first step sends one more"
)
def test_pipeline(tmp_path: Path) -> None:
    """The first rank sends each microbatch's stream, the last its gradient; each reduces once."""
    stream = S * C * BF16
    for rank, weights in ((0, EMBEDDING + 2 * BLOCK), (2, BLOCK + HEAD)):
        found = sizes(counted(tmp_path, PP2, world=4, rank=rank))
        assert found["pp", "send"] == (B, B * stream)
        assert found["pp", "receive"] == (B, B * stream)
        assert found["fsdp", "reduce-scatter"][1] == FP32 * weights
        assert found["fsdp", "all-gather"][1] == BF16 * weights


@pytest.mark.promise("plan-formulas")
def test_experts(tmp_path: Path) -> None:
    """Five exchanges a layer: the numbers, and rows there and back, in forward and in backward.
    What shards and copies experts has groups of its own."""
    settings = [f"{P}expert_parallel_degree=2", f"{P}data_parallel_replicate_degree=2"]
    rows = counted(tmp_path, "--model.name=qwen3_moe", *settings, world=8)
    with_experts = L - 1  # the first layer is dense
    row = rows["ep", "all-to-all"]
    assert row.calls == 5 * with_experts
    rows_sent = 4 * B * S * 2 * C * BF16  # two experts for each token
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
    assert axes["tp"].moved("all-gather", 800) == (600.0, 0.0)
    assert axes["pp"].moved("send", 800) == (0.0, 800.0)


def test_every_rank_sends_what_another_receives() -> None:
    """Bytes that leave machines, added up by hand over two machines of two."""
    axis = axes_of(ParallelDims(dp_shard=4), gpus_per_node=2)["fsdp"]
    total: defaultdict[str, float] = defaultdict(float)
    for what in ("all-gather", "all-to-all"):
        total[what] = 2 * axis.moved(what, 400)[1]
    # all-gather: a machine needs the other's 200 bytes; all-to-all: each of 2 ranks sends 2 x 100
    assert total == {"all-gather": 200.0, "all-to-all": 400.0}
