"""The trainer against twenty lines of plain float64 PyTorch on the same samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.data.dataset import build_dataset
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import load_config
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize

STEPS, PEAK_LR, WARMUP, TOTAL = 10, 8e-4, 5, 20


def reference(job: list[str]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of Llama."""
    model = MODELS["llama3"].build(MODELS["llama3"].flavors["tiny"])
    initialize(model, seed=0)
    return train_plainly(model.double(), job, logits=lambda out: out)


def train_plainly(
    model: nn.Module, job: list[str], *, logits: Callable[[Any], Tensor]
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms before clipping, of AdamW at torch's own hand.

    `logits` takes them from what the model returns.
    """
    config = load_config(job)
    dataset = build_dataset(config.training, tokenizer=build_tokenizer("byte"), seed=0)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    norms_ = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": norms_, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        lr = PEAK_LR * min(step / WARMUP, 1 - (step - 1 - WARMUP) / (TOTAL - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = lr
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


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_norms(world: int, ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), f"--training.steps={STEPS}"]
    rows = ranks.run(jobs.train, job, world=world)[0].rows
    [(losses, norms)] = ranks.run(reference, job, world=1)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
