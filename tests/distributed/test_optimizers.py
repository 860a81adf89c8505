"""Muon in every layout against one device, and resumed in another.

In float32 the whole matrix is orthogonalised alike wherever its owner is, so only the rounding of
gradients may differ. The iteration enlarges the smallest singular values up to 500 times, and with
them that rounding, 1e-7; measured are 1e-7 of a weight, or 2e-6 for adapters.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.pipeline_jobs import TINY8
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_matrix import SIZES, WHERE, Where

MUON = ("--optimizer.name=Muon", "--training.seq_len=40", jobs.UNSAVED)
IN_SIXES = "--training.global_batch_size=6"
ADAPTER = ("--lora.rank=4", "--lora.alpha=8.0", "--optimizer.muon_excluded_params=output.*")
GROUPED = (
    '--optimizer.groups=[{params = ["tok*", "*.0.*"], lr = 1e-3}, {params = "*", lr = 5e-4}]',
)
LAYOUTS: dict[str, tuple[Where, int, tuple[str, ...]]] = {
    "fsdp 3, uneven": (Where({"dp": 3}), 2, (IN_SIXES,)),
    "ddp 2": (WHERE["ddp 2"], 4, GROUPED),
    "hsdp 2x2": (WHERE["hsdp 2x2"], 2, ()),
    "tp 2, adapters": (WHERE["tp 2"], 8, ADAPTER),
    "fsdp 2 x tp 2": (WHERE["fsdp 2 x tp 2"], 4, GROUPED),
    "pp 2": (WHERE["pp 2"], 4, ()),
    "cp 2": (WHERE["cp 2 ring"], 8, ()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_trains_the_same_model(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    where, size, what = LAYOUTS[layout]
    local = () if IN_SIXES not in what else ("--training.local_batch_size=2",)
    reference = on_one_device(pj.train, *MUON, *what, *local, sizes=SIZES)
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *MUON, *what, *where.arguments]
    job += [f"--training.local_batch_size={size}"]
    results = ranks.run(pj.train, job, sizes=SIZES, world=where.world)
    pj.assert_same_training(results, reference)
    for name, value in pj.whole(results, lambda result: result.final).items():
        wanted = reference.final[name]
        assert (value - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_a_run_goes_on_in_another_layout(
    ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    reference = on_one_device(pj.train, *MUON, sizes=SIZES)
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *MUON[:-1]]
    first, then = WHERE["fsdp 2 x tp 2"], WHERE["pp 2"]
    ranks.run(pj.train, [*job, *first.arguments, "--training.steps=1"], sizes=SIZES, world=4)
    ranks.run(pj.train, [*job, "--training.steps=2"], sizes=SIZES, world=1)
    results = ranks.run(pj.train, [*job, *then.arguments], sizes=SIZES, world=2)
    pj.assert_same_course(results, reference)
