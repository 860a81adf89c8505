"""Recomputation by operator leaves no other bit behind in any layout, and repeats what it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.trainer import Trainer

BASE = (
    "--model.flavor=tiny8",
    "--training.seq_len=40",
    "--training.steps=2",
    "--training.local_batch_size=4",
)
NONE = "--activation_checkpoint.mode=none"
BY_OPERATOR = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)
NUM_LAYERS = 8


def parallelism(*settings: str) -> tuple[str, ...]:
    return tuple(f"--parallelism.{setting}" for setting in settings)


TP2 = parallelism("tensor_parallel_degree=2")
REPLICATED = parallelism("enable_sequence_parallel=false")
CP2 = parallelism("context_parallel_degree=2")
PP2 = parallelism("pipeline_parallel_degree=2", "pipeline_parallel_microbatch_size=2")
RING, ULYSSES = (parallelism(f"context_parallel_rotate_method={m}") for m in ("ring", "ulysses"))

LAYOUTS = {
    "fsdp 2 x tp 2": (4, TP2),
    "tp 2, stream replicated": (2, (*TP2, *REPLICATED)),
    "cp 2, ring": (2, (*CP2, *RING)),
    "cp 2, allgather": (2, CP2),
    "cp 2, ulysses": (2, (*CP2, *ULYSSES)),
    "pp 2": (2, PP2),
    "bfloat16": (1, ("--training.mixed_precision_param=bfloat16",)),
}


def job(folder: Path, *options: str, cache: Path, name: str) -> list[str]:
    return [*jobs.write_job(folder, name=name, cache=cache), *BASE, *options]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_changes(layout: str, ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    world, options = LAYOUTS[layout]
    plain = job(tmp_path, *options, NONE, cache=cache, name="plain")
    recomputed = job(tmp_path, *options, *BY_OPERATOR, cache=cache, name="recomputed")
    expected, got = (ranks.run(jobs.train, it, world=world) for it in (plain, recomputed))
    assert [result.state_hash for result in got] == [result.state_hash for result in expected]


class Calls(TorchDispatchMode):
    """Counts what runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def count_calls(job: list[str]) -> Counter[str]:
    trainer = Trainer(jobs.start(job))
    with Calls() as mode:
        trainer.train()
    trainer.close()
    return mode.calls


GATHER, SCATTER, REDUCE = (
    f"_c10d_functional::{name}"
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
)
PRODUCT = "aten::mm"
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

# a ring's hops are counted in test_context_layouts.py: they lie inside one operator
REPEATED = {
    "tp 2": (TP2, {GATHER: 2, SCATTER: 0, PRODUCT: 3, ATTENTION: 0}),
    "tp 2, stream replicated": ((*TP2, *REPLICATED), {REDUCE: 0, PRODUCT: 3}),
    "cp 2, ulysses": ((*CP2, *ULYSSES), {"c10d::alltoall_base_": 2, ATTENTION: 0}),
}


@pytest.mark.parametrize("layout", REPEATED)
def test_what_a_block_repeats(layout: str, ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    options, again = REPEATED[layout]
    once = (*options, "--training.steps=1", "--training.local_batch_size=8")
    plain = job(tmp_path, *once, NONE, cache=cache, name="plain")
    recomputed = job(tmp_path, *once, *BY_OPERATOR, cache=cache, name="recomputed")
    before, after = (ranks.run(count_calls, it, world=2) for it in (plain, recomputed))
    for rank in range(2):
        assert all(before[rank][operator] > 0 for operator in again)
        repeated = {name: after[rank][name] - before[rank][name] for name in again}
        assert repeated == {name: NUM_LAYERS * times for name, times in again.items()}
