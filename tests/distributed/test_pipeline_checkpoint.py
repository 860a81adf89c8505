"""Checkpoints of a pipeline: named by parameter alone, so that every layout reads every other's."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.jobs import logged, refusal
from tests.distributed.pipeline_jobs import TINY8, pipeline
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_intentions import (
    CONTINUE,
    EVERYTHING,
    FINETUNE,
    Beginning,
    begin,
    elsewhere,
    excluding,
)
from tests.distributed.test_parts import resized

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one device": (1, ()),
    "fsdp 2": (2, jobs.FSDP),
    "pp 2 ZBV x fsdp 2": (4, pipeline("ZBVZeroBubble")),
    "pp 2 1F1B": (2, pipeline("1F1B")),
}
TP2 = "--parallelism.tensor_parallel_degree=2"
CP2 = "--parallelism.context_parallel_degree=2"
MIXED: dict[str, tuple[int, tuple[str, ...]]] = {
    **LAYOUTS,
    "fsdp 2 x tp 2": (4, (TP2,)),
    "cp 2 x pp 2 1F1B": (4, (CP2, *pipeline("1F1B"))),
    "pp 2 1F1B x tp 2": (4, (*pipeline("1F1B"), TP2)),
}
CHAINS = [
    (True, ("pp 2 ZBV x fsdp 2", "one device", "pp 2 ZBV x fsdp 2")),
    (True, ("fsdp 2", "pp 2 ZBV x fsdp 2", "pp 2 1F1B")),
    (
        False,
        (
            "pp 2 ZBV x fsdp 2",
            "fsdp 2 x tp 2",
            "one device",
            "cp 2 x pp 2 1F1B",
            "pp 2 1F1B x tp 2",
        ),
    ),
]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The folder of a pipeline's run of 2 steps."""
    folder = tmp_path_factory.mktemp("saved")
    job = [*jobs.write_job(folder, TINY8, cache=cache), *pipeline("ZBVZeroBubble")]
    ranks.run(jobs.train, [*job, "--training.steps=2"], world=2)
    return folder / "run"


def whole(beginnings: list[Beginning]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Put weights and optimizer state of all ranks together."""
    model = {n: t for begun in beginnings for n, t in begun.model.items()}
    optimizer = {n: t for begun in beginnings for n, t in begun.optimizer.items()}
    return model, optimizer


@pytest.mark.parametrize(("tied", "chain"), CHAINS)
def test_a_run_goes_through_layouts_as_if_on_one_device(
    tied: bool,
    chain: tuple[str, ...],
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: OneDevice,
) -> None:
    """A step in each layout, against the same steps in one go on one device."""
    train = pj.train_tied if tied else pj.train
    reference = on_one_device(train, f"--training.steps={len(chain)}")
    job = jobs.write_job(tmp_path, TINY8, cache=cache)
    for step, layout in enumerate(chain, start=1):
        world, arguments = MIXED[layout]
        results = ranks.run(train, [*job, *arguments, f"--training.steps={step}"], world=world)
    pj.assert_same_course(results, reference)


def test_weights_and_optimizer_state_arrive_bit_for_bit(
    saved: Path, ranks: RankPool, cache: Path
) -> None:
    job = jobs.write_job(saved.parent, TINY8, cache=cache)
    [one] = ranks.run(begin, job, world=1)
    assert any(t.any() for n, t in one.optimizer.items() if n.endswith(".exp_avg"))
    for layout in ("pp 2 ZBV x fsdp 2", "pp 2 1F1B"):
        world, arguments = LAYOUTS[layout]
        model, optimizer = whole(ranks.run(begin, [*job, *arguments], world=world))
        assert model.keys() == one.model.keys()
        assert all(value.equal(one.model[name]) for name, value in model.items())
        assert optimizer.keys() == one.optimizer.keys()
        assert all(value.equal(one.optimizer[name]) for name, value in optimizer.items())


def test_what_does_not_fit_is_one_message_on_every_rank(
    saved: Path, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), FINETUNE, elsewhere(saved)]
    sizes = {"vocab_size": 300, "num_layers": 9}
    [alone] = ranks.run(resized, refusal, sizes, job, "tiny8", world=1)
    assert "84 tensors" in alone
    assert "9 missing: 'layers.8.attention.wk.weight'" in alone
    assert "unexpected" not in alone
    assert "2 of another shape: 'output.weight'" in alone
    in_stages = ranks.run(resized, refusal, sizes, [*job, *pipeline("1F1B")], "tiny8", world=2)
    assert in_stages == [alone, alone]


def test_a_pattern_counts_where_another_rank_holds_what_it_stands_for(
    saved: Path, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), elsewhere(saved), *pipeline("1F1B")]
    part = [*job, CONTINUE, EVERYTHING, excluding("output.*", "layers.0.*")]
    for lines in ranks.run(logged, part, world=2):
        assert any("1 parameter: output.weight" in line for line in lines)
        assert any("'layers.0.*': 9 parameters" in line for line in lines)
    for message in ranks.run(refusal, [*job, FINETUNE, excluding("outptu.*")], world=2):
        assert "exclude_from_loading: 'outptu.*'" in message
