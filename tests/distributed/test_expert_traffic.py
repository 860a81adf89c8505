"""What experts send, counted in a step and compared with the formulas of parallel/expert.py.

Tokens are dealt out to the experts in turn, so that each rank gets as many from each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_experts import MOE, ep
from tests.jobs import OPTIONS, TP2, UNSAVED
from torchtitan.parallel.expert import Exchange
from torchtitan.trainer import Trainer

NUM_LAYERS = 2  # with experts: the first of them is dense
E, K, C = 8, 2, 32
B, S = 8, 16
STEP = ("--model.num_layers=3", "--training.steps=1", f"--training.seq_len={S}")
FREED = "--parallelism.fsdp_reshard_after_forward=always"


@dataclass
class Traffic:
    """What one rank did in one step."""

    num_told: int = 0
    """Waits for the numbers of rows."""
    numbers: int = 0
    """Numbers of rows handed to all_to_all."""
    leaving: int = 0
    """Those of them for other ranks."""
    calls: Counter[str] = field(default_factory=Counter)


def in_turn(scores_BSE: Tensor, bias_E: Tensor | None) -> Tensor:
    batch, seq_len, _ = scores_BSE.shape
    return torch.arange(batch * seq_len * K).remainder(E).view(batch, seq_len, K)


def count(job: list[str]) -> Traffic:
    """Train a step on this rank."""
    found = Traffic()
    tell, all_to_all = Exchange._exchange_counts, dist.all_to_all_single

    def telling(self: Exchange, counts: Tensor) -> Any:
        found.num_told += 1
        return tell(self, counts)

    def exchanging(out: Tensor, x: Tensor, came: Any = None, sent: Any = None, **k: Any) -> Any:
        if sent is None:
            found.calls["numbers of rows"] += 1
        else:
            found.calls["rows"] += 1
            found.numbers += x.numel()
            rank = dist.get_rank(k["group"])
            found.leaving += x.numel() - sent[rank] * x.shape[1]
        return all_to_all(out, x, came, sent, **k)

    run = jobs.start(job)
    for part in run.model:
        for block in part.layers.values():
            if hasattr(block, "moe"):
                router = block.moe.router
                kept = router.choose
                recomputes = isinstance(kept, partial)
                router.choose = partial(kept.func, in_turn) if recomputes else in_turn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "_exchange_counts", telling)
        patch.setattr(dist, "all_to_all_single", exchanging)
        trainer = Trainer(run)
        trainer.train()
        trainer.close()
    return found


# ranks, ep, samples of a data-parallel rank, where and how; times that rows travel
LAYOUTS: dict[str, tuple[int, int, int, tuple[str, ...], int]] = {
    "ep 2": (2, 2, 4, (), 4),
    "ep 2, accumulating": (2, 2, 2, (), 4),
    "ep 2, recomputed": (2, 2, 4, OPTIONS["recomputed"], 6),
    "ep 2, by operator": (2, 2, 4, OPTIONS["by operator"], 6),
    "ep 2, fsdp 4": (4, 2, 2, (), 4),
    "ep 4": (4, 4, 2, (), 4),
    "ep 4, recomputed": (4, 4, 2, OPTIONS["recomputed"], 6),
    "ep 2, tp 2": (2, 2, 8, (TP2,), 4),
}


@pytest.mark.promise("experts")
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_travel_as_often_as_said(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    world, degree, size, how, times = LAYOUTS[layout]
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *STEP, *how, ep(degree), FREED]
    job += [UNSAVED, f"--training.local_batch_size={size}"]
    microbatches = 2 if "accumulating" in layout else 1
    num_runs = NUM_LAYERS * microbatches
    for found in ranks.run(count, job, world=world):
        assert found.num_told == found.calls["numbers of rows"] == num_runs
        assert found.calls["rows"] == times * num_runs
        assert found.numbers == NUM_LAYERS * times * B * S * K // world * C
        assert found.leaving * degree == found.numbers * (degree - 1)
