"""Experts that get no token, few experts, recomputed choices; layouts are in test_matrix.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from tests.jobs import IN_SIXES, OPTIONS, TINY8, UNSAVED, ep, pipeline
from torchtitan.models.moe import Router

MOE = TINY8.replace("[model]", '[model]\nname = "qwen3_moe"')
SHORT = ("--training.seq_len=40", "--training.steps=2")


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


def hashes(jobs_of: list[list[str]]) -> set[str]:
    with pj.strong_weights():
        return {jobs.train(job).state_hash for job in jobs_of}


@pytest.mark.promise("experts")
@pytest.mark.slow
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
