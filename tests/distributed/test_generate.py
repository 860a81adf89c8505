"""Text of a model whose matrices several ranks share: token for token that of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import hf_jobs, jobs
from tests.distributed.hf_jobs import LENGTH, PROMPTS
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY8
from tests.models.reference import random_decoder, reference_of
from torchtitan.models.families import MODELS


@pytest.mark.promise("generation")
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.long
def test_greedy_text_of_two_ranks_is_that_of_transformers(
    family: str, ranks: RankPool, tmp_path: Path
) -> None:
    model = random_decoder(MODELS[family].flavors["tiny8"])
    reference = reference_of(model)
    reference.save_pretrained(tmp_path)
    expected = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        found = reference.generate(
            tokens, attention_mask=mask, max_new_tokens=LENGTH, do_sample=False, pad_token_id=0
        )
        expected.append(found[0, len(prompt) :].tolist())
    results = ranks.run(hf_jobs.texts, tmp_path, world=2)
    assert [found for found, _ in results] == [expected] * 2
    # a rank holds its half, the norms, and all of what makes latents
    whole = sum(p.numel() for p in model.parameters())
    copied = sum(p.numel() for name, p in model.named_parameters() if "_a.weight" in name)
    assert all(held < 0.52 * whole + copied for _, held in results)


@pytest.mark.promise("generation")
@pytest.mark.slow
def test_text_of_low_rank_factors_is_that_of_the_merged_export(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The step holds matrices and factors apart, the export their sum."""
    job = [*jobs.write_job(tmp_path, TINY8), "--training.steps=2", "--optimizer.lr=0.1"]
    job += ["--lora.rank=2", "--lora.alpha=32", "--checkpoint.last_save_in_hf"]
    ranks.run(jobs.train, job, world=1)
    checkpoint = tmp_path / "run" / "checkpoint"
    [(expected, _)] = ranks.run(hf_jobs.texts, checkpoint / "export" / "step-2", world=1)
    [(found, whole)] = ranks.run(hf_jobs.texts, checkpoint / "step-2", world=1)
    assert found == expected
    results = ranks.run(hf_jobs.texts, checkpoint / "step-2", world=2)
    assert [found for found, _ in results] == [expected] * 2
    assert all(held < 0.55 * whole for _, held in results)
