"""Experts that get no token, few experts, recomputed choices; layouts are in test_matrix.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from tests.jobs import EXPERTS, FEW_EXPERTS, IN_SIXES, OPTIONS, TINY8, UNSAVED, ep, pipeline
from tests.naming import naming
from torchtitan.models.init import local_part
from torchtitan.models.moe import Router
from torchtitan.trainer import Trainer

MOE = TINY8.replace("[model]", '[model]\nname = "qwen3_moe"')
SHORT = ("--training.seq_len=40", "--training.steps=2")
IN_PAIRS = "--training.local_batch_size=2"


def train_among_two(job: list[str]) -> pj.Trained:
    """Train with routers that all send to the first two experts: six get no token on any rank."""
    correct = Router.forward

    def forward(self: Router, x_TC: Tensor, _: None = None) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = correct(self, x_TC)
        return torch.arange(2).expand_as(ids_TK), weights_TK

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", forward)
        return pj.train(job)


WITHOUT_A_TOKEN: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "fsdp 3": (3, 2, ()),
    "pp 2 ZBV": (2, 6, pipeline("ZBVZeroBubble")),
    "ep 2, compiled": (2, 3, (ep(2), *OPTIONS["compiled"])),
}


@pytest.mark.promise("ep")
@pytest.mark.slow
@pytest.mark.parametrize("layout", WITHOUT_A_TOKEN)
def test_experts_without_a_token(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    options = (*SHORT, *IN_SIXES)
    reference = on_one_device(train_among_two, *options, toml=MOE)
    assert not reference.gradients["layers.1.moe.experts.w2"][2:].any()
    world, size, how = WITHOUT_A_TOKEN[layout]
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *options, *how, UNSAVED]
    job += [f"--training.local_batch_size={size}"]
    results = ranks.run(train_among_two, job, world=world)
    pj.assert_same_training(results, reference)


def shards(jobs_of: list[list[str]]) -> list[set[tuple[int, ...]]]:
    found = []
    for job in jobs_of:
        run = jobs.start([*job, *FEW_EXPERTS])
        named = run.model.named_parameters()
        found.append({tuple(local_part(p).shape) for n, p in named if n.endswith("experts.w1")})
        Trainer(run).close()
    return found


@pytest.mark.slow
def test_what_a_rank_holds_of_few_experts(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    given = [
        [*jobs.write_job(tmp_path, MOE, name=name, cache=cache), *how, IN_PAIRS, UNSAVED]
        for name, how in (("fsdp 4", ()), ("ep 2", (ep(2),)))
    ]
    assert ranks.run(shards, given, world=4) == [[{(2, 6, 32)}, {(1, 12, 32)}]] * 4


@pytest.mark.promise("bfloat16")
@pytest.mark.slow
def test_bfloat16_is_near_float32(
    ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    """On one device, which casts weights where they are used, and where FSDP casts them."""
    expected = [row["loss"] for row in on_one_device(pj.train, *SHORT, toml=MOE).rows]
    in_bfloat16 = (*SHORT, "--training.mixed_precision_param=bfloat16", UNSAVED)
    found = []
    for world in (1, 2):
        job = [*jobs.write_job(tmp_path, MOE, name=f"on{world}", cache=cache), *in_bfloat16]
        job += [f"--training.local_batch_size={8 // world}"]
        result = ranks.run(pj.train, job, world=world)[0]
        found.append([row["loss"] for row in result.rows])
    # of one another they may be twice as far: FSDP rounds other gradients, and processors sum
    # products of bfloat16 in other orders (1.1e-3 without vector instructions)
    for losses in found:
        assert losses == pytest.approx(expected, rel=2**-8)
        assert losses != pytest.approx(expected, rel=1e-6)


def hashes(jobs_of: list[list[str]]) -> set[str]:
    with pj.strong_weights():
        return {jobs.train(job).state_hash for job in jobs_of}


@pytest.mark.promise("experts")
def test_recomputation_chooses_the_same_experts(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    """Bit for bit: another choice in backward would show."""
    ways = ("none", "recomputed", "half recomputed", "by operator")
    given = [
        [*jobs.write_job(tmp_path, MOE, name=way, cache=cache), *SHORT, *OPTIONS.get(way, ())]
        for way in ways
    ]
    [found] = ranks.run(hashes, [[*job, UNSAVED] for job in given], world=1)
    assert len(found) == 1


@pytest.mark.slow
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
        (("--model.name=llama3", "--model.num_experts=4"), ["num_experts", "llama3"]),
        (("--model.name=qwen3", "--model.flavor=30B-A3B"), ["flavor", "30B-A3B"]),
    ],
)
def test_what_cannot_be_is_refused(
    options: tuple[str, ...], parts: list[str], ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), EXPERTS, *options]
    for message in ranks.run(jobs.refusal, job, world=2):
        assert all(part in message for part in parts), message


@pytest.mark.slow
def test_the_log_says_what_a_token_meets(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    job: Any = [*jobs.write_job(tmp_path, cache=cache), EXPERTS, UNSAVED]
    [lines] = ranks.run(jobs.logged, job, world=1)
    assert any(map(naming("qwen3_moe", "tiny", "63,632", "35,984").match, lines))
