"""Recomputation by operator leaves no other bit behind in any layout, and repeats what it says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import UNSAVED
from torchtitan.trainer import Trainer

NUM_LAYERS = 2
BASE = (
    "--model.flavor=tiny8",
    f"--model.num_layers={NUM_LAYERS}",
    "--training.seq_len=40",
    "--training.steps=1",
    UNSAVED,
    "--training.local_batch_size=8",
)
NONE = "--activation_checkpoint.mode=none"
BY_OPERATOR = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)


def parallelism(*settings: str) -> tuple[str, ...]:
    return tuple(f"--parallelism.{setting}" for setting in settings)


TP2 = parallelism("tensor_parallel_degree=2")
REPLICATED = parallelism("enable_sequence_parallel=false")
CP2 = parallelism("context_parallel_degree=2")
PP2 = parallelism("pipeline_parallel_degree=2", "pipeline_parallel_microbatch_size=2")
RING, ULYSSES = (parallelism(f"context_parallel_rotate_method={m}") for m in ("ring", "ulysses"))

GATHER, SCATTER, REDUCE = (
    f"_c10d_functional::{name}"
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
)
PRODUCT = "aten::mm"
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
# ranks, options, and how often a block repeats an operator; a ring's hops are counted in
# test_context_layouts.py: they lie inside one operator
LAYOUTS: dict[str, tuple[int, tuple[str, ...], dict[str, int]]] = {
    "fsdp 2, bfloat16": (
        2,
        ("--training.local_batch_size=4", "--training.mixed_precision_param=bfloat16"),
        {},
    ),
    "tp 2": (2, TP2, {GATHER: 2, SCATTER: 0, PRODUCT: 4, ATTENTION: 0}),
    "tp 2, stream replicated": (2, (*TP2, *REPLICATED), {REDUCE: 0, PRODUCT: 4}),
    "cp 2, ring": (2, (*CP2, *RING), {}),
    "cp 2, ulysses": (2, (*CP2, *ULYSSES), {"c10d::alltoall_base_": 2, ATTENTION: 0}),
    "pp 2": (2, PP2, {}),
}


class Calls(TorchDispatchMode):
    """Counts what runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def train(job: list[str]) -> tuple[str, Counter[str]]:
    """Train; return the hash of all state, and what ran."""
    run = jobs.start(job)
    trainer = Trainer(run)
    with Calls() as mode:
        trainer.train()
    trainer.close()
    return jobs.hash_state(run), mode.calls


@pytest.mark.promise("compile")
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_bit_changes_and_only_so_much_is_repeated(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    world, options, again = LAYOUTS[layout]
    found = {}
    for name, mode in (("plain", (NONE,)), ("recomputed", BY_OPERATOR)):
        job = [*jobs.write_job(tmp_path, name=name, cache=cache), *BASE, *options, *mode]
        found[name] = ranks.run(train, job, world=world)
    for (expected, before), (got, after) in zip(found["plain"], found["recomputed"], strict=True):
        assert got == expected
        assert after != before
        assert all(before[operator] > 0 for operator in again)
        repeated = {name: after[name] - before[name] for name in again}
        assert repeated == {name: NUM_LAYERS * times for name, times in again.items()}
