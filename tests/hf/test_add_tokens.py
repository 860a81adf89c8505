"""More tokens: `convert --add_tokens` appends rows, and `lora.train_embeddings` trains them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.models.reference import random_decoder, reference_of
from torchtitan.hf.weights import COVARIANCE_SCALE, add_rows
from torchtitan.models.families import MODELS
from torchtitan.tools.convert import to_hf
from torchtitan.tools.dcp_folder import from_hf

VOCABULARY = {"tok_embeddings.weight", "output.weight"}


@pytest.mark.promise("new-rows")
@pytest.mark.parametrize("center", [0.0, 0.7])
def test_as_many_new_rows_have_mean_and_covariance_of_the_stored(center: float) -> None:
    mixing = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.2, -0.3], [0.0, 0.0, 0.01]])
    stored = (torch.randn(57, 3, generator=torch.Generator().manual_seed(0)) @ mixing).double()
    grown = add_rows(stored + center, 57)
    assert torch.equal(grown[:57], stored + center)
    new = grown[57:]
    torch.testing.assert_close(new.mean(0), stored.mean(0) + center, rtol=1e-9, atol=1e-10)
    expected = COVARIANCE_SCALE * torch.cov(stored.T, correction=0)
    torch.testing.assert_close(torch.cov(new.T, correction=0), expected, rtol=1e-6, atol=1e-18)
    assert len(new.unique(dim=0)) == 57


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    small = replace(MODELS["llama3"].flavors["tiny"], vocab_size=258)
    reference_of(random_decoder(small)).save_pretrained(folder)
    return folder


@pytest.mark.promise("new-rows")
@pytest.mark.slow
def test_both_directions_add_rows_and_keep_the_stored(
    base: Path, ranks: RankPool, tmp_path: Path
) -> None:
    settings = from_hf(base, tmp_path / "dcp", dtype="float32", add_tokens=6)
    assert "model.vocab_size = 264" in settings
    job = [
        *jobs.write_job(tmp_path),
        f"--checkpoint.initial_load_path={tmp_path / 'dcp'}",
        "--model.vocab_size=264",
        "--training.steps=1",
        "--optimizer.lr=1e-30",
    ]
    ranks.run(jobs.train, job, world=2)
    to_hf(tmp_path / "run", tmp_path / "hf", add_tokens=8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    before, after = load_file(base / "model.safetensors"), model.state_dict()
    for name, weight in before.items():
        torch.testing.assert_close(after[name][: len(weight)], weight, rtol=0, atol=1e-20)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert len(after[name]) == 272
        expected = before[name].mean(0)
        torch.testing.assert_close(after[name][258:].mean(0), expected, rtol=0, atol=1e-3)


@pytest.mark.promise("new-rows")
@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_vocabulary_is_trained_beside_an_adapter(
    world: int, base: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = [
        *jobs.write_job(tmp_path),
        f"--checkpoint.initial_load_path={base}",
        "--checkpoint.initial_load_in_hf",
        "--model.vocab_size=258",
        "--lora.rank=2",
        "--lora.train_embeddings",
        "--lora.export_format=adapter",
        "--checkpoint.last_save_in_hf",
        "--training.steps=3",
    ]
    result = ranks.run(jobs.train, job, world=world)[0]
    changed = {n for n, w in result.initial.items() if not torch.equal(w, result.final[n])}
    assert {name for name in changed if ".lora_" not in name} == VOCABULARY
    export = tmp_path / "run" / "checkpoint" / "export" / "step-3"
    config = json.loads((export / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"]
    tensors = load_file(export / "adapter_model.safetensors")
    embedding = tensors["base_model.model.model.embed_tokens.weight"]
    assert torch.equal(embedding, result.final["tok_embeddings.weight"])
    assert len(tensors["base_model.model.lm_head.weight"]) == 258
