"""Low-rank factors on their way to Hugging Face, against `transformers` with weights added by hand,
and a whole run that starts from its folder and ends in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.models.reference import VARIANTS, family_name, random_decoder, reference_of
from tests.naming import naming
from torchtitan.api import load_generator
from torchtitan.finetune.lora import apply_lora, is_adapter
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.hf.export import HFExport, export
from torchtitan.hf.names import Names
from torchtitan.hf.peft import AdapterExport
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.spec import ModelSpec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TOKENS = torch.arange(40).reshape(2, 20) * 7 % 263
BOTH = pytest.mark.parametrize("variant", ["grouped", "normed heads, tied", "biased"])
ALL = ("layers.*.attention.w*", "layers.1.feed_forward.w[12]")
SETTINGS = LoRAConfig(rank=3, alpha=6.0, rank_stabilized=True, modules=ALL)


def family(variant: str) -> ModelSpec:
    return MODELS[family_name(VARIANTS[variant])]


def adapted(variant: str) -> Decoder:
    model = random_decoder(VARIANTS[variant])
    model.initial = family(variant).build(model.config).initial
    apply_lora(model, settings=SETTINGS, names=family(variant).hf.names)
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(p, std=0.1)
    return model


def exported(variant: str, model: Decoder, folder: Path, *, merge: bool, **more: Any) -> Path:
    writer = dcp.FileSystemWriter(folder / "step-1" / "model")
    dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    settings = HFExport(
        names=Names(family(variant).hf, model.config),
        adapter=AdapterExport(settings=SETTINGS, merge=merge, base="base"),
        **more,
    )
    export(folder / "step-1", folder / "out", settings=settings, group=None)
    return folder / "out"


@pytest.mark.promise("lora")
@BOTH
def test_the_merged_model_says_what_the_adapted_one_says(variant: str, tmp_path: Path) -> None:
    model = adapted(variant)
    folder = exported(variant, model, tmp_path, merge=True, max_file_bytes=20_000)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    with torch.no_grad():
        found, expected = theirs(TOKENS).logits, model.double()(TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # stored in float32
    plain = random_decoder(VARIANTS[variant]).double()
    assert (plain(TOKENS) - expected).abs().max() > 0.1


@pytest.mark.promise("lora")
@BOTH
def test_an_adapter_added_by_hand_to_the_base_says_the_same(variant: str, tmp_path: Path) -> None:
    """By PEFT's names and formula: W + lora_alpha / sqrt(r) B A (rsLoRA), for each module that it
    targets."""
    model = adapted(variant)
    folder = exported(variant, model, tmp_path, merge=False, max_file_bytes=1000)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((folder / "adapter_config.json").read_text())
    factors = load_file(folder / "adapter_model.safetensors")
    everywhere = [f"{w}_proj" for w in "koqv"]
    ends = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"]
    assert config["target_modules"][:4] == everywhere
    assert sorted(config["target_modules"][4:]) == sorted(ends)
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", "base")
    base = reference_of(random_decoder(VARIANTS[variant])).double()
    num_added = 0
    for name, module in base.named_modules():
        targets = config["target_modules"]
        if name in targets or any(name.endswith(f".{target}") for target in targets):
            a = factors.pop(f"base_model.model.{name}.lora_A.weight").double()
            b = factors.pop(f"base_model.model.{name}.lora_B.weight").double()
            assert len(a) == config["r"]
            assert config["use_rslora"]
            module.weight.data += config["lora_alpha"] / config["r"] ** 0.5 * b @ a
            num_added += 1
    assert not factors
    assert num_added == 10
    with torch.no_grad():
        found, expected = base(TOKENS).logits, model.double()(TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # its rotation is float32


@pytest.mark.promise("lora")
@pytest.mark.slow
def test_a_run_from_a_folder_to_a_folder(ranks: RankPool, tmp_path: Path) -> None:
    """The base is read as it is, the factors begin with the run; a resumed one goes on exactly."""
    base = random_decoder(MODELS["llama3"].flavors["tiny"])
    reference_of(base).save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    more = {"attention_dropout": 0.1, "initializer_range": 0.04}
    named = {"auto_map": {"AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, **more, **named}))
    lora = ["--lora.rank=2", "--optimizer.lr=0.02", "--checkpoint.last_save_in_hf"]
    begins = [
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={tmp_path / 'base'}",
    ]
    hashes = {}
    for name, stops in (("whole", (4,)), ("stopped", (2, 4))):
        for stop in stops:
            job = [*jobs.write_job(tmp_path, name=name), *lora, *begins]
            [result, *_] = ranks.run(jobs.train, [*job, f"--training.steps={stop}"], world=2)
        hashes[name] = result.state_hash
    assert hashes["whole"] == hashes["stopped"]
    for name, weight in base.state_dict().items():
        assert torch.equal(result.final[name], weight), name
    checkpoint = tmp_path / "whole" / "checkpoint"
    theirs = LlamaForCausalLM.from_pretrained(
        checkpoint / "export" / "step-4", attn_implementation="eager"
    )
    written = json.loads((checkpoint / "export" / "step-4" / "config.json").read_text())
    assert {key: written.get(key) for key in more} == more
    assert "auto_map" not in written
    # as torchtitan generate does
    ours = load_generator(checkpoint / "step-4", device=torch.device("cpu")).model
    with torch.no_grad():
        found, expected = theirs(TOKENS).logits, ours(TOKENS)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert (expected - base(TOKENS)).abs().max() > 0.1
    # another rank's factors begin anew from that run's base; the same ones go on
    again = [
        *jobs.write_job(tmp_path, name="again"),
        f"--checkpoint.initial_load_path={checkpoint}",
    ]
    [same] = ranks.run(jobs.train, [*again, "--lora.rank=2", "--training.steps=1"], world=1)
    for name, weight in same.initial.items():
        assert torch.equal(weight, result.final[name]), name
    [said] = ranks.run(jobs.refusal, [*again, "--lora.rank=3"], world=1)
    assert naming("lora.rank", 2, 3).match(said)
    fresh = [
        *jobs.write_job(tmp_path, name="fresh"),
        f"--checkpoint.initial_load_path={checkpoint}",
    ]
    [said] = ranks.run(jobs.refusal, [*fresh, "--lora.rank=3"], world=1)
    assert naming("'layers.0.attention.wk.lora_a'", "[2, 32]", "[3, 32]").match(said)
    [said] = ranks.run(jobs.refusal, fresh, world=1)
    assert "28 unexpected: 'layers.0.attention.wk.lora_a'" in said
