"""A checkpoint of any layout loads into any other, bit for bit.

The tiny model's vocabulary of 263 divides by no number of ranks here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_intentions import begin

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one device": (1, ()),
    "fsdp 2": (2, jobs.FSDP),
    "fsdp 3": (3, jobs.FSDP),
    "fsdp 4": (4, jobs.FSDP),
    "hsdp 2x2": (4, jobs.HSDP),
    "ddp 2": (2, jobs.DDP),
}
# a batch of 12 is cut by 1, 2, 3 and 4 ranks
BATCH = ("--training.local_batch_size=1", "--training.global_batch_size=12")


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_loads_another(
    source: str, cache: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path, cache=cache), *BATCH]
    world, overrides = LAYOUTS[source]
    [trained, *_] = ranks.run(jobs.train, [*job, *overrides, "--training.steps=1"], world=world)
    [saved, *_] = ranks.run(begin, [*job, *overrides], world=world)
    assert all(saved.model[n].equal(t) for n, t in trained.final.items())
    assert any(t.any() for n, t in saved.optimizer.items() if n.endswith(".exp_avg"))
    targets = list(LAYOUTS)
    # each layout is loaded by one other: every one is source and target
    world, overrides = LAYOUTS[targets[(targets.index(source) + 1) % len(targets)]]
    for loaded in ranks.run(begin, [*job, *overrides], world=world):
        assert loaded.model.keys() == saved.model.keys()
        assert loaded.optimizer.keys() == saved.optimizer.keys()
        assert all(loaded.model[n].equal(saved.model[n]) for n in saved.model)
        assert all(loaded.optimizer[n].equal(t) for n, t in saved.optimizer.items())
        assert (loaded.step, loaded.position) == (1, 12)
