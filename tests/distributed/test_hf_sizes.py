"""Folders of Hugging Face in sizes that no flavor has: named once, read, saved, written back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.distributed import hf_jobs, jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY

SIZES: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 12_345.0}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rms_norm_eps=3e-6, rope_parameters=LLAMA3, head_dim=14),
    "qwen2": Qwen2Config(**SIZES, rope_theta=7777.0, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=18),
    "mistral": MistralConfig(**SIZES, sliding_window=9, head_dim=10),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, head_dim=10),
    "phi3": Phi3Config(**SIZES, sliding_window=9, pad_token_id=None),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=18,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=28,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
}
FSDP2 = "--training.global_batch_size=-1"
TP2 = "--parallelism.tensor_parallel_degree=2"
EP2 = "--parallelism.expert_parallel_degree=2"
PP2 = "--parallelism.pipeline_parallel_degree=2"
DIFFERENT = {  # what a config.json says beyond the model, or says in another way
    "dtype": "the type in which they are written",
    "torch_dtype": "its older name",
    "rope_parameters": "written as rope_theta and rope_scaling, which versions 4 and 5 read",
    "rope_theta": "see rope_parameters",
    "rope_scaling": "see rope_parameters",
    "transformers_version": "of whoever wrote it",
    "attention_dropout": "0, its default",
    "initializer_range": "of pretraining",
    "pretraining_tp": "of Megatron",
    "layer_types": "follows from use_sliding_window",
    "max_window_layers": "see layer_types",
    "sliding_window": "read only where windows are used",
    "num_local_experts": "another name of num_experts",
    "original_max_position_embeddings": "of LongRoPE",
    "output_router_logits": "a switch of their forward",
    "router_aux_loss_coef": "of their training",
}


def theirs(path: Path, config: PreTrainedConfig) -> torch.nn.Module:
    torch.manual_seed(1)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(path)  # type: ignore[operator]
    return model


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(40).remainder(7).mul(37).remainder(300)[None]
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def job_of(folder: Path, source: Path, *options: str) -> list[str]:
    toml = TINY.replace('flavor = "tiny"', "")
    return [
        *jobs.write_job(folder, toml),
        "--checkpoint.enable",
        f"--checkpoint.initial_load_path={source}",
        "--checkpoint.initial_load_in_hf",
        "--checkpoint.last_save_in_hf",
        *options,
    ]


@pytest.mark.promise("round-trip")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", FSDP2),
        ("qwen3", PP2),
        ("mistral", TP2),
        ("qwen2", PP2),
        ("mixtral", EP2),
        ("phi3", TP2),
        ("qwen3_moe", EP2),
    ],
)
def test_no_step_changes_nothing(family: str, layout: str, ranks: RankPool, tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    expected = logits_of(theirs(source, FAMILIES[family]))
    still = ("--training.steps=1", "--optimizer.lr=1e-30")
    ranks.run(hf_jobs.train, job_of(tmp_path, source, layout, *still), world=2)
    [written] = tmp_path.glob("**/step-1/config.json")
    got = logits_of(AutoModelForCausalLM.from_pretrained(written.parent))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    before, after = (json.loads(file.read_text()) for file in (source / "config.json", written))
    missing = before.keys() - after.keys() - DIFFERENT.keys()
    changed = {k for k in before.keys() & after.keys() if before[k] != after[k]} - DIFFERENT.keys()
    assert not missing
    assert not changed


@pytest.mark.promise("exact-resume")
@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_where_the_folder_is_gone(
    tmp_path: Path, ranks: RankPool
) -> None:
    source, straight = tmp_path / "theirs", tmp_path / "straight"
    straight.mkdir()
    theirs(source, FAMILIES["mistral"])
    two_steps = "--training.steps=2"
    through = ranks.run(hf_jobs.train, [*job_of(straight, source), two_steps], world=1)
    job = job_of(tmp_path, source)
    ranks.run(hf_jobs.train, [*job, "--training.steps=1"], world=1)
    shutil.rmtree(source)
    assert ranks.run(hf_jobs.train, [*job, two_steps], world=1) == through
