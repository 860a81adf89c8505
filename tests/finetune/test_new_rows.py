"""Tokens that the base lacks, trained beside an adapter: only their rows change, in every layout,
and `transformers` computes the same from either export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY
from tests.models.reference import random_decoder, reference_of
from torchtitan import build
from torchtitan.api import open_generator
from torchtitan.build import describe_export
from torchtitan.hf.export import export as export_to_hf
from torchtitan.job import load_config
from torchtitan.layout import find_layout
from torchtitan.models.families import MODELS
from torchtitan.models.interface import ModelParts
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.resume_rules import read_settings
from torchtitan.tools.convert import to_hf

pytestmark = pytest.mark.slow

BASE_ROWS = 100
VOCABULARY = ("tok_embeddings.weight", "output.weight")
TOKENS = torch.arange(40).reshape(2, 20) * 7 % 258
FAMILIES = {"llama3": "llama3", "tied": "qwen3"}
TP2 = ("--parallelism.tensor_parallel_degree=2",)
PP2 = ("--parallelism.pipeline_parallel_degree=2",)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp 2": (2, ()),
    "tp 2": (2, TP2),
    "pp 2, fsdp 2": (4, PP2),
}


def write_base(family: str, folder: Path) -> Path:
    sizes = MODELS[FAMILIES[family]].flavors["tiny"]
    small = replace(sizes, vocab_size=BASE_ROWS, tie_embeddings=family == "tied")
    reference_of(random_decoder(small)).save_pretrained(folder / "base")
    return folder / "base"


def write_job(base: Path, folder: Path, *options: str, name: str = "run") -> list[str]:
    """A job whose bytes from 100 on are new tokens, with everything that could move old rows."""
    return [
        *jobs.write_job(folder, name=name, toml=TINY.replace('flavor = "tiny"', 'name = "hf"')),
        f"--checkpoint.initial_load_path={base}",
        "--checkpoint.initial_load_in_hf",
        "--model.vocab_size=264",
        "--checkpoint.grow_vocab",
        "--lora.rank=2",
        "--optimizer.lr=0.02",
        "--optimizer.weight_decay=0.5",
        "--training.local_batch_size=4",
        *options,
    ]


def check_rows(initial: dict[str, Tensor], final: dict[str, Tensor]) -> None:
    """Check which rows have changed."""
    for name in initial.keys() & VOCABULARY:
        moved = (initial[name] != final[name]).any(1)
        assert not moved[:BASE_ROWS].any(), name
        assert moved[BASE_ROWS:258].all() or name != "output.weight", name
        assert moved[BASE_ROWS:258].sum() > 10, name


@pytest.fixture(scope="module", params=FAMILIES)
def trained(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, jobs.Result]:
    """A base, the folder of a run of four steps on one rank, and what it returned."""
    folder = tmp_path_factory.mktemp(request.param)
    base = write_base(request.param, folder)
    job = write_job(base, folder, "--training.steps=4", "--checkpoint.last_save_in_hf")
    [result] = ranks.run(jobs.train, [*job, "--lora.export_format=adapter"], world=1)
    return base, folder / "run", result


@pytest.mark.promise("new-rows")
@pytest.mark.parametrize(
    ("trained", "layout"),
    [("llama3", "fsdp 2"), ("llama3", "tp 2"), ("tied", "tp 2"), ("tied", "pp 2, fsdp 2")],
    indirect=["trained"],
)
def test_only_new_rows_change_in_every_layout(
    layout: str, trained: tuple[Path, Path, jobs.Result], ranks: RankPool, tmp_path: Path
) -> None:
    base, _, alone = trained
    check_rows(alone.initial, alone.final)
    world, options = LAYOUTS[layout]
    job = write_job(base, tmp_path, *options, "--training.steps=4")
    results = ranks.run(jobs.train, job, world=world)
    initial = {n: t for each in results for n, t in each.initial.items()}
    final = {n: t for each in results for n, t in each.final.items()}
    check_rows(initial, final)
    for name, weight in alone.initial.items():
        assert torch.equal(initial[name], weight), name
    for row, expected in zip(results[0].rows, alone.rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("trained", ["tied"], indirect=True)
def test_a_resumed_run_trains_the_same_rows(
    trained: tuple[Path, Path, jobs.Result], ranks: RankPool, tmp_path: Path
) -> None:
    base, _, whole = trained
    for steps in (2, 4):
        job = write_job(base, tmp_path, f"--training.steps={steps}")
        [result] = ranks.run(jobs.train, job, world=1)
    assert result.state_hash == whole.state_hash
    check_rows(whole.initial, result.final)


def test_a_run_that_trains_none_of_them_exports_them(
    trained: tuple[Path, Path, jobs.Result], ranks: RankPool, tmp_path: Path
) -> None:
    _, run, before = trained
    job = [
        f"--job.config_file={run / 'config.toml'}",
        f"--job.dump_folder={tmp_path / 'run'}",
        f"--checkpoint.initial_load_path={run / 'checkpoint' / 'step-4'}",
        "--checkpoint.initial_load_in_hf=false",
        "--checkpoint.grow_vocab=false",
        "--training.steps=1",
    ]
    [result] = ranks.run(jobs.train, job, world=1)
    export = tmp_path / "run" / "checkpoint" / "export" / "step-1"
    tensors = load_file(export / "adapter_model.safetensors")
    held = [name for name in tensors if name.endswith("token_adapter.trainable_tokens_delta")]
    assert len(held) == len(result.final.keys() & VOCABULARY)
    embedding = tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert torch.equal(embedding, before.final["tok_embeddings.weight"][BASE_ROWS:])


@pytest.mark.parametrize(
    ("options", "spares"),
    [
        ([], False),
        (["--lora.rank=2"], False),
        (["--checkpoint.grow_vocab"], False),
        (["--lora.rank=2", "--checkpoint.grow_vocab"], True),
    ],
)
def test_one_rule_says_which_vocabulary_is_trained(
    options: list[str], spares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[OptimizerConfig] = []
    monkeypatch.setattr(build, "build_optimizer", lambda _, settings, **__: given.append(settings))
    job = ["--model.flavor=tiny", "--checkpoint.initial_load_path=base", *options]
    config = load_config([*job, "--training.mixed_precision_param=float32"])
    build.build_optimizer_of(config, model=ModelParts([]))
    added = {*given[0].no_decay_params} - {*config.optimizer.no_decay_params}
    assert (added == {*VOCABULARY}, config.trains_new_rows) == (spares, spares)
    assert added == set() or spares
    layout = find_layout(config, world_size=1)
    trained = layout.trained.freeze_rest
    model = layout.spec.build_meta(layout.architecture)
    if layout.adapt is not None:
        layout.adapt(model)
    trained(model)
    frozen = {name for name in VOCABULARY if not model.get_parameter(name).requires_grad}
    assert frozen == ({*VOCABULARY} if config.lora.rank and not spares else set())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


def test_either_export_computes_what_the_run_does(
    trained: tuple[Path, Path, jobs.Result], tmp_path: Path
) -> None:
    base, run, result = trained
    step = run / "checkpoint" / "step-4"
    with torch.no_grad():
        expected = open_generator(step, device=torch.device("cpu")).model(TOKENS)
    to_hf(step, tmp_path / "merged", lora="merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)

    export = run / "checkpoint" / "export" / "step-4"
    config = json.loads((export / "adapter_config.json").read_text())
    tensors = load_file(export / "adapter_model.safetensors")
    # by PEFT's names and formulas, on a base with as many rows
    theirs = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    theirs.resize_token_embeddings(264, mean_resizing=False)
    modules = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
    held = {"tok_embeddings.weight": "embed_tokens", "output.weight": "lm_head"}
    ids = list(range(BASE_ROWS, 264))
    assert config["trainable_token_indices"] == {
        module: ids for name, module in held.items() if name in result.final
    }
    for module in config["trainable_token_indices"]:
        name = f"base_model.model.{modules[module]}.token_adapter.trainable_tokens_delta"
        theirs.get_submodule(modules[module]).weight.data[ids] = tensors.pop(name)
    for name, module in theirs.named_modules():
        if any(name.endswith(f".{target}") for target in config["target_modules"]):
            a = tensors.pop(f"base_model.model.{name}.lora_A.weight")
            b = tensors.pop(f"base_model.model.{name}.lora_B.weight")
            module.weight.data += config["lora_alpha"] / config["r"] * b @ a
    assert not tensors
    for num_tokens, given in ((258, 158), (BASE_ROWS, 0)):  # PEFT resizes to the tokenizer
        described = replace(describe_export(read_settings(step), dtype=None), card=None)
        export_to_hf(
            step, tmp_path / "few", settings=replace(described, num_tokens=num_tokens), group=None
        )
        config = json.loads((tmp_path / "few" / "adapter_config.json").read_text())
        listed = config.get("trainable_token_indices", {"": []})
        assert all(each == ids[:given] for each in listed.values())
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-4, atol=1e-4)
