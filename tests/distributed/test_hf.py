"""Hugging Face's weights in whole jobs: read into every layout, written at the end of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from tests.distributed import hf_jobs, jobs
from tests.distributed import test_reference as by_torch
from tests.distributed.rank_pool import RankPool
from tests.hf.test_deepseek import float8_folder
from tests.hf.test_folders import imported
from tests.jobs import TINY
from tests.models.reference import LATENT, new_decoder, random_decoder, reference_of
from tests.models.test_families import read
from torchtitan.hf.config import TOKEN_IDS, new_config
from torchtitan.models import llama3
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.interface import LanguageModel

pytestmark = pytest.mark.slow

TIED, TIE = {"tie_embeddings": True}, "--model.tie_embeddings=true"
SMALL, LAYERS = {"num_layers": 2}, "--model.num_layers=2"


def folder_of(
    path: Path, flavor: str = "tiny", *, family: str = "llama3", **changes: Any
) -> tuple[Path, LanguageModel]:
    """A folder of random weights that transformers wrote, in files of 20 KB, and the model."""
    config = dataclasses.replace(MODELS[family].flavors[flavor], **changes)
    if f"{NAME}{family}" == PHI3:
        ids = dict.fromkeys(TOKEN_IDS)
        content = new_config(config, format=MODELS[family].hf, dtype=torch.float32, carried=ids)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
        theirs.save_pretrained(path, max_shard_size="20KB")
        return path, read(path)[0]
    model = random_decoder(config)
    reference_of(model).save_pretrained(path, max_shard_size="20KB")
    return path, model


def job_from(folder: Path, source: Path, *options: str, flavor: str = "tiny") -> list[str]:
    return [
        *jobs.write_job(folder, TINY.replace('"tiny"', f'"{flavor}"')),
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={source}",
        "--training.local_batch_size=4",
        *options,
    ]


TP2 = "--parallelism.tensor_parallel_degree=2"
PP2 = "--parallelism.pipeline_parallel_degree=2"
NAME = "--model.name="
QWEN2, QWEN3, QWEN3_MOE = f"{NAME}qwen2", f"{NAME}qwen3", f"{NAME}qwen3_moe"
DEEPSEEK, PHI3 = f"{NAME}deepseek_v3", f"{NAME}phi3"
LAYOUTS = {
    # 32 rows of wq, heads of 8: shards of 11 rows cut them
    "fsdp 3": (3, "tiny", {}, ("--training.global_batch_size=-1",)),
    "pp 2": (2, "tiny8", TIED | SMALL, (PP2, TIE, LAYERS)),
    # norms of heads of 12: shards of 4 elements cut them
    "fsdp 3, qwen3": (3, "tiny", {}, (QWEN3, "--training.global_batch_size=-1")),
    # biases of 32 elements, heads of 4: shards of 8 are of two heads
    "fsdp 2, tp 2, qwen2": (4, "tiny8", SMALL, (QWEN2, TP2, LAYERS)),
    # 64 rows of wq, wk and wv in one tensor: shards of 11, 6 and 6
    "fsdp 3, phi3": (3, "tiny", {}, (PHI3, "--training.global_batch_size=-1")),
    "fsdp 2, tp 2, phi3": (4, "tiny8", SMALL, (PHI3, TP2, LAYERS)),
    # eight experts: three, three and two
    "fsdp 3, experts": (3, "tiny", {}, (QWEN3_MOE, "--training.global_batch_size=-1")),
    "fsdp 2, tp 2, ep 2, deepseek": (
        4,
        "tiny8",
        SMALL,
        (DEEPSEEK, TP2, "--parallelism.expert_parallel_degree=2", LAYERS),
    ),
}


def family_of(options: tuple[str, ...]) -> str:
    named = (option.removeprefix(NAME) for option in options if option.startswith(NAME))
    return next(named, "llama3")


@pytest.mark.promise("hf")
@pytest.mark.slow(gate=["fsdp 3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_begins_with_these_weights_and_each_rank_reads_its_own_alone(
    layout: str, ranks: RankPool, tmp_path: Path
) -> None:
    world, flavor, changes, options = LAYOUTS[layout]
    family = family_of(options)
    source, model = folder_of(tmp_path / "theirs", flavor, family=family, **changes)
    job = job_from(tmp_path, source, *options, flavor=flavor)
    results = ranks.run(hf_jobs.begin, job, world=world)
    expected = model.state_dict()
    assert set().union(*(weights for weights, _, _ in results)) == expected.keys()
    for weights, num_read, num_held in results:
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
        assert num_read == num_held  # files and job are in float32
    whole = sum(t.nbytes for t in expected.values())
    if world > 1:
        assert max(num_read for _, num_read, _ in results) < 0.7 * whole


@pytest.mark.promise("hf")
def test_of_float8_each_rank_reads_its_own_part(ranks: RankPool, tmp_path: Path) -> None:
    """A byte for each number of its shard, and the scales of the blocks that it meets."""
    source, _ = float8_folder(tmp_path / "theirs", block=16)
    job = job_from(tmp_path, source, DEEPSEEK)
    results = ranks.run(hf_jobs.begin, job, world=2)
    expected = imported(source, LATENT).state_dict()
    assert set().union(*(weights for weights, _, _ in results)) == expected.keys()
    whole = (source / "model.safetensors").stat().st_size
    for weights, num_read, num_held in results:
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
        assert num_read < 0.55 * whole
        assert num_read < 0.5 * num_held


@pytest.mark.promise("float64", "experts")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v2"])
def test_a_training_with_experts_is_that_of_transformers(
    family: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Ten steps of float64 PyTorch around their model, from the same initial weights."""
    steps = f"--training.steps={by_torch.STEPS}"
    job = [*jobs.write_job(tmp_path), f"{NAME}{family}", steps, "--training.local_batch_size=8"]
    [result] = ranks.run(jobs.train, job, world=1)
    model = new_decoder(MODELS[family].flavors["tiny"])
    model.load_state_dict(result.initial)
    theirs = reference_of(model).double()
    theirs.config._experts_implementation = "eager"  # the others take no float64
    losses, norms = by_torch.train_plainly(theirs, job, logits=lambda out: out.logits)
    assert [row["loss"] for row in result.rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in result.rows] == pytest.approx(norms, rel=1e-4)


@pytest.mark.promise("hf")
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (TIED, ("--checkpoint.last_save_model_only", TP2, TIE)),
        ({}, (QWEN3_MOE, "--checkpoint.async_mode=async")),
        ({"rope_scaling": None}, (DEEPSEEK, TP2, "--model.rope_scaling.type=none")),
    ],
)
def test_the_last_weights_go_to_transformers(
    changes: dict[str, Any], options: tuple[str, ...], ranks: RankPool, tmp_path: Path
) -> None:
    family = family_of(options)
    source, model = folder_of(tmp_path / "theirs", "tiny8", family=family, **SMALL, **changes)
    said = json.loads((source / "config.json").read_text())
    said |= {"bos_token_id": 256, "eos_token_id": [7, 9]}
    (source / "config.json").write_text(json.dumps(said))
    job = job_from(
        tmp_path,
        source,
        "--checkpoint.last_save_in_hf",
        "--training.steps=1",
        "--optimizer.lr=0.1",
        LAYERS,
        *options,
        flavor="tiny8",
    )
    final = ranks.run(jobs.train, job, world=2)[0].final
    assert not torch.equal(final["norm.weight"], model.state_dict()["norm.weight"])
    model.load_state_dict(final)
    expected = reference_of(model)
    folder = tmp_path / "run" / "checkpoint" / "export" / "step-1"
    found = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert type(found) is type(expected)
    weights = dict(found.named_parameters())
    assert all(torch.equal(weights[name], p) for name, p in expected.named_parameters())
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, expected(tokens).logits)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    kept = ("bos_token_id", "eos_token_id", "max_position_embeddings")
    assert {key: config[key] for key in kept} == {key: said[key] for key in kept}


def test_ranks_share_the_files_of_an_export(ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), "--training.steps=1"]
    final = ranks.run(jobs.train, job, world=2)[0].final
    step = tmp_path / "run" / "checkpoint" / "step-1"
    ranks.run(hf_jobs.export_together, step, tmp_path / "out", world=2)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    model = Decoder(llama3.FLAVORS["tiny"])
    model.load_state_dict(final)
    found = dict(LlamaForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    expected = reference_of(model).named_parameters()
    assert all(torch.equal(found[name], p) for name, p in expected)
