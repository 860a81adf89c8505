"""A model with experts trains alike in every layout, its experts dealt out or not.

The first of four layers is dense, so that stages with and without experts are there. Gradients of
every parameter are compared before an optimizer sees them: Adam hides a wrong scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.pipeline_jobs import TINY8, pipeline
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_intentions import begin
from tests.distributed.test_matrix import COPIED, HOW, TP2, cp, frozen
from tests.distributed.test_resume import exact
from torchtitan.models import qwen3_moe
from torchtitan.models.init import Init, Normal, local_part
from torchtitan.models.moe import Router
from torchtitan.models.sizes import DecoderConfig
from torchtitan.trainer import Trainer

MOE = TINY8.replace("[model]", '[model]\nname = "qwen3_moe"')
NAME = "--model.name=qwen3_moe"
SHORT = ("--training.seq_len=40", "--training.steps=2")
IN_SIXES = ("--training.global_batch_size=6",)
WITHIN = ("--training.attn_mask_type=block_causal",)
ADAPTER = ("--lora.rank=4", "--lora.alpha=8.0", '--lora.modules=["layers.*.attention.w*"]')
MUON = ("--optimizer.name=Muon",)
CHUNKS = ("--training.seq_len=41",)


def ep(degree: int) -> str:
    """Return the argument of expert parallelism."""
    return f"--parallelism.expert_parallel_degree={degree}"


# ranks, samples of a rank and microbatch, what is trained, where and how
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...], tuple[str, ...]]] = {
    "one device, accumulating, recomputed": (1, 2, (), HOW["recomputed"]),
    "fsdp 2, compiled": (2, 4, (), HOW["compiled"]),
    "fsdp 2, by operator": (2, 4, (), HOW["by operator"]),
    "fsdp 2, adapters": (2, 4, ADAPTER, ()),
    "fsdp 2, frozen experts": (2, 4, (frozen("*.experts.*"),), HOW["half recomputed"]),
    "fsdp 2, frozen routers, odd tokens": (2, 4, (frozen("*.router.*"), *CHUNKS), ()),
    "fsdp 3, uneven": (3, 2, IN_SIXES, ()),
    "fsdp 3, Muon": (3, 2, (*IN_SIXES, *MUON), ()),
    "ddp 2, accumulating": (2, 2, (), jobs.DDP),
    "hsdp 2x2, Muon": (4, 2, MUON, jobs.HSDP),
    "hsdp 2x2, kept, offloaded": (4, 2, (), (*jobs.HSDP, *HOW["kept"], *HOW["offloaded"])),
    "cp 2, ring, recomputed": (2, 8, (), (*cp(2, "ring"), *HOW["recomputed"])),
    "cp 2, documents": (2, 8, WITHIN, cp(2, "ulysses")),
    "cp 2, fsdp 2": (4, 4, (), cp(2, "allgather")),
    "pp 2, recomputed": (2, 4, (), (*pipeline("1F1B"), *HOW["recomputed"])),
    "pp 2, ZBV": (2, 4, (), pipeline("ZBVZeroBubble")),
    "pp 2, fsdp 2, interleaved": (4, 4, (), pipeline("Interleaved1F1B")),
    "pp 2, cp 2": (4, 4, (), (*pipeline("1F1B"), *cp(2, "ring"))),
    "tp 2": (2, 8, (), (TP2,)),
    "tp 2, stream copied, odd tokens": (2, 8, CHUNKS, (TP2, COPIED, *HOW["recomputed"])),
    "tp 2, fsdp 2": (4, 4, (), (TP2, *HOW["by operator"])),
    "ep 2": (2, 4, (), (ep(2),)),
    "ep 2, by operator": (2, 4, (), (ep(2), *HOW["by operator"])),
    "ep 2, recomputed, odd tokens": (2, 2, CHUNKS, (ep(2), *HOW["recomputed"])),
    "ep 2, compiled": (2, 4, (), (ep(2), *HOW["compiled"])),
    "ep 2, frozen experts": (2, 4, (frozen("*.experts.*"),), (ep(2), *HOW["half recomputed"])),
    "ep 2, adapters": (2, 4, ADAPTER, (ep(2),)),
    "ep 4": (4, 2, (), (ep(4),)),
    "ep 4, offloaded": (4, 2, (), (ep(4), *HOW["offloaded"])),
    "ep 2, fsdp 4": (4, 2, (), (ep(2), *HOW["kept"])),
    "ep 2, fsdp 4, Muon": (4, 2, MUON, (ep(2),)),
    "ep 2, hsdp 2x2": (4, 2, (), (*jobs.HSDP, ep(2))),
    "ep 2, tp 2": (2, 8, (), (TP2, ep(2), *HOW["recomputed"])),
    "ep 2, tp 2, stream copied": (2, 8, CHUNKS, (TP2, COPIED, ep(2))),
    "ep 2, tp 2, fsdp 2": (4, 4, (), (TP2, ep(2), *HOW["by operator"])),
    "ep 4, tp 2, fsdp 2": (4, 4, (), (TP2, ep(4))),
    "ep 2, cp 2": (2, 8, (), (*cp(2, "ring"), ep(2))),
    "ep 4, cp 2, fsdp 2, documents": (4, 4, WITHIN, (*cp(2, "allgather"), ep(4))),
    "ep 4, cp 2, tp 2": (4, 8, (), (*cp(2, "ulysses"), TP2, ep(4))),
    **{
        f"ep 2, pp 2 {schedule}": (4, 4, (), (*pipeline(schedule), ep(2)))
        for schedule in pj.SCHEDULES
    },
    "ep 2, pp 2, tp 2, recomputed": (
        4,
        8,
        (),
        (*pipeline("Interleaved1F1B"), TP2, ep(2), *HOW["recomputed"]),
    ),
}


@contextmanager
def strong_experts() -> Iterator[None]:
    """Let experts start so large that they matter, and routers so that few choices nearly tie."""
    correct = qwen3_moe.initial

    def initial(config: DecoderConfig, name: str) -> Init:
        return Normal(std=0.3) if ".moe." in name else correct(config, name)

    qwen3_moe.initial = initial
    try:
        yield
    finally:
        qwen3_moe.initial = correct


def train(job: list[str], *, evaluating: bool = False) -> pj.Trained:
    with strong_experts():
        return pj.train(job, evaluating=evaluating)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    world, size, what, how = LAYOUTS[layout]
    evaluating = world > 1 and "compiled" not in layout
    local = ("--training.local_batch_size=2",) if IN_SIXES[0] in what else ()
    reference = on_one_device(train, *SHORT, *what, *local, toml=MOE, evaluating=evaluating)
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *SHORT, *what, *how, jobs.UNSAVED]
    job += [f"--training.local_batch_size={size}"]
    results = ranks.run(train, job, evaluating=evaluating, world=world)
    pj.assert_same_training(results, reference)
    if evaluating:
        pj.assert_same_evaluation(results, reference, cp=2 if "cp 2" in layout else 1)


def test_experts_and_routers_are_trained(on_one_device: OneDevice) -> None:
    """What the layouts are compared with is no model whose experts do nothing."""
    result = on_one_device(train, *SHORT, toml=MOE, evaluating=True)
    names = {name for name in result.gradients if ".moe." in name}
    assert len(names) == 3 * 4
    largest = max(float(gradient.norm()) for gradient in result.gradients.values())
    assert all(float(result.gradients[name].norm()) > 1e-3 * largest for name in names)


def train_among_two(job: list[str]) -> pj.Trained:
    """Train with routers that all send to the first two experts: six get no token on any rank."""
    correct = Router.forward

    def forward(self: Router, x_TC: Tensor, _: None = None) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = correct(self, x_TC)
        return torch.arange(2).expand_as(ids_TK), weights_TK

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", forward)
        return train(job)


WITHOUT_A_TOKEN: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "fsdp 3": (3, 2, ()),
    "pp 2 ZBV": (2, 6, pipeline("ZBVZeroBubble")),
    "ep 2": (2, 3, (ep(2), *HOW["recomputed"])),
    "ep 4, tp 2": (4, 3, (TP2, ep(4), *HOW["compiled"])),
}


@pytest.mark.parametrize("layout", WITHOUT_A_TOKEN)
def test_experts_without_a_token(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    options = (*SHORT, *IN_SIXES, "--training.local_batch_size=2")
    reference = on_one_device(train_among_two, *options, toml=MOE)
    assert not reference.gradients["layers.1.moe.experts.w2"][2:].any()
    world, size, how = WITHOUT_A_TOKEN[layout]
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *options, *how, jobs.UNSAVED]
    job += [f"--training.local_batch_size={size}"]
    results = ranks.run(train_among_two, job, world=world)
    pj.assert_same_training(results, reference)


FEW = {
    **pj.FOUR_LAYERS,
    "num_experts": 2,
    "num_experts_per_token": 1,
    "norm_expert_weights": False,  # else a router has no gradient
}


def train_few(job: list[str]) -> pj.Trained:
    with strong_experts():
        return pj.train(job, sizes=FEW)


@pytest.mark.parametrize("how", [(), (ep(2),), (ep(2), TP2)], ids=["fsdp 4", "ep 2", "ep 2, tp 2"])
def test_fewer_experts_than_ranks(
    how: tuple[str, ...],
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: OneDevice,
) -> None:
    """Each is cut by its width, so that every rank holds as much of it."""
    reference = on_one_device(train_few, *SHORT, toml=MOE)
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *SHORT, *how, jobs.UNSAVED]
    job += [f"--training.local_batch_size={4 if TP2 in how else 2}"]
    results = ranks.run(train_few, job, world=4)
    pj.assert_same_training(results, reference)


def shards(job: list[str]) -> set[tuple[int, ...]]:
    with jobs.changed_flavor(job, "tiny8", FEW):
        run = jobs.start(job)
    found = {
        tuple(local_part(p).shape)
        for name, p in run.model.named_parameters()
        if name.endswith("experts.w1")
    }
    Trainer(run).close()
    return found


def test_what_a_rank_holds_of_few_experts(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    for number, (how, shape) in enumerate({(): (2, 6, 32), (ep(2),): (1, 12, 32)}.items()):
        job = [*jobs.write_job(tmp_path, MOE, name=str(number), cache=cache), *how, jobs.UNSAVED]
        assert ranks.run(shards, [*job, "--training.local_batch_size=2"], world=4) == [{shape}] * 4


def test_bfloat16_is_near_float32(
    ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    """On one device, which casts weights where they are used, and where FSDP casts them."""
    expected = [row["loss"] for row in on_one_device(train, *SHORT, toml=MOE, evaluating=True).rows]
    in_bfloat16 = (*SHORT, "--training.mixed_precision_param=bfloat16", jobs.UNSAVED)
    found = []
    for world in (1, 2):
        job = [*jobs.write_job(tmp_path, MOE, name=f"on{world}", cache=cache), *in_bfloat16]
        job += [f"--training.local_batch_size={8 // world}"]
        result = ranks.run(train, job, world=world)[0]
        found.append([row["loss"] for row in result.rows])
    # of one another they may be twice as far: FSDP rounds other gradients, and processors sum
    # products of bfloat16 in other orders (1.1e-3 without vector instructions)
    for losses in found:
        assert losses == pytest.approx(expected, rel=2**-8)
        assert losses != pytest.approx(expected, rel=1e-6)


def train_strongly(job: list[str]) -> jobs.Result:
    with strong_experts():
        return jobs.train(job)


def test_recomputation_chooses_the_same_experts(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    """Bit for bit: another choice in backward would show."""
    found = set()
    for way in ("none", "recomputed", "half recomputed", "by operator"):
        job = [*jobs.write_job(tmp_path, MOE, name=way, cache=cache), *SHORT, jobs.UNSAVED]
        [result] = ranks.run(train_strongly, [*job, *HOW.get(way, ())], world=1)
        found.add(result.state_hash)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("world", "how"), [(1, ()), (2, ("--optimizer.name=Muon",)), (2, (ep(2), *HOW["recomputed"]))]
)
def test_a_resumed_run_goes_on_bit_for_bit(
    world: int, how: tuple[str, ...], ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    jobs_of = [
        [*jobs.write_job(tmp_path, MOE, name=name, cache=cache), "--training.steps=4", *how]
        for name in ("through", "parts")
    ]
    through = ranks.run(jobs.train, jobs_of[0], world=world)[0]
    ranks.run(jobs.train, [*jobs_of[1], "--training.steps=2"], world=world)
    resumed = ranks.run(jobs.train, jobs_of[1], world=world)[0]
    assert exact(resumed.rows) == exact(through.rows)
    assert resumed.state_hash == through.state_hash


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "how",
    [(3, ()), pytest.param((4, (ep(2),)), marks=LONG), pytest.param((4, (ep(4), TP2)), marks=LONG)],
    ids=str,
)
def test_a_checkpoint_loads_into_other_layouts(
    how: tuple[int, tuple[str, ...]], ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), "--training.local_batch_size=1"]
    job += ["--training.global_batch_size=12"]
    trained = ranks.run(jobs.train, [*job, "--training.steps=1", *how[1]], world=how[0])[0]
    layouts: list[tuple[int, tuple[str, ...]]] = [
        (1, ()),
        (2, jobs.DDP),
        (4, jobs.HSDP),
        (2, (ep(2),)),
        (4, (ep(2), TP2)),
        (2, (*pipeline("1F1B"), "--training.local_batch_size=2")),
    ]
    for world, where in layouts:
        loaded = ranks.run(begin, [*job, *where], world=world)
        found = {name: tensor for one in loaded for name, tensor in one.model.items()}
        assert found.keys() == trained.final.keys()
        assert all(found[name].equal(tensor) for name, tensor in trained.final.items())
        assert all((one.step, one.position) == (1, 12) for one in loaded)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ((ep(3),), ["expert_parallel_degree", "= 2, got 3", "one of 1, 2"]),
        (
            (ep(2), "--model.num_experts=5"),
            [
                "expert_parallel_degree",
                "must divide the experts of a layer, got 2 for 5",
                "1, 5",
            ],
        ),
        ((ep(2), "--model.name=llama3"), ["expert_parallel_degree", "the model has no experts"]),
        (
            ("--lora.rank=4", '--lora.modules=["*.experts.*"]'),
            ["modules", "must match a linear layer"],
        ),
        (("--model.num_experts=3", "--model.num_experts_per_token=4"), ["num_experts", "got 4 of"]),
        (("--model.num_dense_layers=2",), ["num_dense_layers", "got 2 of 2"]),
        (("--model.name=llama3", "--model.num_experts=4"), ["num_experts", "take qwen3_moe"]),
        (("--model.name=qwen3", "--model.flavor=30B-A3B"), ["flavor", "qwen3_moe"]),
    ],
)
def test_what_cannot_be_is_refused(
    options: tuple[str, ...], parts: list[str], ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), NAME, *options]
    for message in ranks.run(jobs.refusal, job, world=2):
        assert all(part in message for part in parts), message


def test_the_log_says_what_a_token_meets(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    job: Any = [*jobs.write_job(tmp_path, cache=cache), NAME, jobs.UNSAVED]
    [lines] = ranks.run(jobs.logged, job, world=1)
    assert any("qwen3_moe tiny: 63,632 parameters (35,984 active)" in line for line in lines)
