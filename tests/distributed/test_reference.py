"""The trainer against twenty lines of plain float64 PyTorch on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import DDP, TIED, frozen, pipeline
from torchtitan.base.patterns import matches
from torchtitan.data.documents import build_text
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import load_config
from torchtitan.models.families import find_model
from torchtitan.models.init import initialize

TIED_ZBV = (
    *(*pipeline("ZBVZeroBubble"), *DDP, TIED),
    *("--model.num_layers=4", "--training.local_batch_size=4"),
)
STEPS, HALF, PEAK_LR, WARMUP, TOTAL = 6, 3, 8e-4, 5, 20


def reference(
    job: list[str], first: Sequence[str] = (), then: Sequence[str] = ()
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of Llama; parameters `first` are frozen, and `then` others."""
    spec, sizes = find_model(load_config(job).model)
    model = spec.build(sizes)
    initialize(model, seed=0)
    return train_plainly(
        model.double(), job, logits=lambda out: out, freezes=lambda k: first if k <= HALF else then
    )


def train_plainly(
    model: nn.Module,
    job: list[str],
    *,
    logits: Callable[[Any], Tensor],
    freezes: Callable[[int], Sequence[str]] = lambda step: (),
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms before clipping, of AdamW at torch's own hand.

    `logits` takes them from what the model returns; `freezes` returns patterns for a step.
    """
    config = load_config(job)
    dataset = build_text(config.training, tokenizer=build_tokenizer("byte"), seed=0)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    norms_ = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": norms_, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        lr = PEAK_LR * min(step / WARMUP, 1 - (step - 1 - WARMUP) / (TOTAL - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, p in model.named_parameters():
            p.requires_grad_(not matches(name, freezes(step)))
        batch = [dataset[k] for k in range(8 * (step - 1), 8 * step)]
        tokens = torch.stack([sample["tokens"] for sample in batch])
        labels = torch.stack([sample["labels"] for sample in batch])
        loss = F.cross_entropy(
            logits(model(tokens)).flatten(0, 1), labels.flatten()
        )  # of valid ones
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return losses, norms


@pytest.mark.promise("float64", "dp", "loss")
@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_norms(world: int, ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), f"--training.steps={STEPS}"]
    rows = ranks.run(jobs.train, job, world=world)[0].rows
    [(losses, norms)] = ranks.run(reference, job, world=1)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)


@pytest.mark.promise("dp", "pp")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "world", "options"),
    [
        ((), 2, ()),
        (("output.*",), 2, pipeline("1F1B")),
        pytest.param((), 2, DDP, marks=pytest.mark.long),
        pytest.param((), 4, TIED_ZBV, marks=pytest.mark.long),
    ],
    ids=["all", "others, pp 2", "all, ddp 2", "all, tied, pp 2 ZBV x ddp 2"],
)
def test_other_parameters_are_trained_after_a_continue(
    then: tuple[str, ...], world: int, options: tuple[str, ...], ranks: RankPool, tmp_path: Path
) -> None:
    first = ("tok_embeddings.*", "layers.0.*")
    job = [*jobs.write_job(tmp_path), *options]
    begun = [*job, f"--training.steps={HALF}", frozen(*first)]
    ranks.run(jobs.train, begun, world=world)
    job += [f"--training.steps={STEPS}", "--checkpoint.mode=continue", frozen(*then)]
    rows = ranks.run(jobs.train, job, world=world)[0].rows
    [(losses, norms)] = ranks.run(reference, job, first, then, world=1)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
