"""A checkpoint of any layout loads into any other, and a run resumes in it as on one device.

Parameters and their optimizer state have the same names in every layout. Loaded tensors are
compared bit for bit with the trained ones, losses and weights of the next steps with one device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_elastic import LOGGED, samples
from tests.distributed.test_intentions import Beginning, begin, standing
from tests.jobs import DDP, EXPERTS, FSDP, HSDP, TIED, TINY8, TP2, cp, ep, pipeline
from torchtitan.trainer import Trainer

pytestmark = pytest.mark.slow

# ranks, data-parallel ranks
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "one device": (1, 1, ()),
    "fsdp 2": (2, 2, FSDP),
    "fsdp 3": (3, 3, FSDP),
    "tp 2": (2, 1, (TP2,)),
    "ddp 2": (2, 2, DDP),
    "hsdp 2x2": (4, 4, HSDP),
    "fsdp 2 x tp 2": (4, 2, (TP2,)),
    "fsdp 3 x tp 2": (6, 3, (TP2,)),
    "cp 2 ring": (2, 1, cp(2, "ring")),
    "pp 2": (2, 1, pipeline("1F1B")),
    "pp 2 ZBV x fsdp 2": (4, 2, pipeline("ZBVZeroBubble")),
    "ep 2 x tp 2": (4, 2, (ep(2), TP2)),
    "ep 4 x tp 2": (4, 2, (ep(4), TP2)),
}
BATCH = 12  # which 1, 2, 3 and 4 ranks can share
# what two tensor-parallel ranks can split, but three shards of it cannot evenly
SPLIT = (
    *("--model.dim=16", "--model.num_heads=8", "--model.num_kv_heads=4"),
    *("--model.hidden_dim=40", "--model.vocab_size=268"),
)
MOE = (EXPERTS, "--model.flavor=tiny8", "--model.num_layers=2")
MODELS = {"tiny": (), "split": SPLIT, "experts": MOE}
# model, layout that saves, layouts that load; no number of ranks divides tiny's vocabulary of 263
LOADS = [
    ("tiny", "one device", ["fsdp 3"]),
    ("tiny", "fsdp 3", ["ddp 2"]),
    ("tiny", "ddp 2", ["one device"]),
    ("split", "tp 2", ["fsdp 3 x tp 2"]),
    ("split", "fsdp 3 x tp 2", ["hsdp 2x2"]),
    ("experts", "ep 4 x tp 2", ["fsdp 3"]),
    ("experts", "fsdp 3", ["ep 2 x tp 2", "pp 2"]),
]


def train(job: list[str]) -> Beginning:
    """Train; return this rank's parameters and their state as they are then."""
    run = jobs.start(job)
    trainer = Trainer(run)
    trainer.train()
    trainer.close()
    return standing(run)


def whole(found: list[Beginning]) -> dict[str, Tensor]:
    """Put the tensors of all ranks together."""
    return {n: t for one in found for n, t in (*one.model.items(), *one.optimizer.items())}


@pytest.mark.promise("resume-elsewhere")
@pytest.mark.slow(gate=["tiny-one device-targets0"])
@pytest.mark.parametrize(("model", "source", "targets"), LOADS)
def test_a_checkpoint_loads_into_other_layouts(
    model: str,
    source: str,
    targets: list[str],
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
) -> None:
    job = [*jobs.write_job(tmp_path, cache=cache), *MODELS[model]]
    job += [f"--training.global_batch_size={BATCH}"]

    def of(layout: str) -> tuple[int, list[str]]:
        world, dp, arguments = LAYOUTS[layout]
        return world, [*job, *arguments, f"--training.local_batch_size={BATCH // dp}"]

    world, arguments = of(source)
    saved = whole(ranks.run(train, [*arguments, "--training.steps=1"], world=world))
    assert any(t.any() for n, t in saved.items() if n.endswith(".exp_avg"))
    for target in targets:
        world, arguments = of(target)
        begun = ranks.run(begin, arguments, world=world)
        loaded = whole(begun)
        assert loaded.keys() == saved.keys()
        assert [name for name, tensor in saved.items() if not loaded[name].equal(tensor)] == []
        assert all((one.step, one.position) == (1, BATCH) for one in begun)


CHAINS = [
    ((), ["tp 2", "cp 2 ring", "fsdp 2", "pp 2"]),
    ((TIED, "--optimizer.name=Muon"), ["fsdp 2 x tp 2", "pp 2 ZBV x fsdp 2", "one device"]),
]


@pytest.mark.promise("data-order", "resume-elsewhere")
@pytest.mark.parametrize(("what", "chain"), CHAINS, ids=["dense", "tied, Muon"])
def test_a_run_goes_through_layouts_as_if_on_one_device(
    what: tuple[str, ...],
    chain: list[str],
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: OneDevice,
) -> None:
    """A step in each layout; each sample is drawn once."""
    steps = len(chain)
    reference = on_one_device(pj.train, f"--training.steps={steps}", *what)
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *what, LOGGED]
    for step, layout in enumerate(chain, start=1):
        world, _, arguments = LAYOUTS[layout]
        options = [*job, *arguments, f"--training.steps={step}"]
        results = ranks.run(pj.train, options, world=world)
    pj.assert_same_course(results, reference)
    assert [number for number, _, _ in samples(tmp_path / "run")] == list(range(steps * 8))
