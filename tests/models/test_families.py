"""Families against transformers: folders that it wrote, both ways, and the same training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models.test_transformers import batch, ten_steps, write_folder
from torchtitan import load_config
from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.build import describe_export
from torchtitan.finetune.lora import apply_lora, is_adapter
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.hf.config import (
    TOKEN_IDS,
    architecture_of,
    family_of,
    find_inexpressible,
    read_config,
    sizes_of,
)
from torchtitan.hf.export import HFExport, export
from torchtitan.hf.folder import open_folder
from torchtitan.hf.names import Names
from torchtitan.hf.peft import AdapterExport
from torchtitan.models.families import MODELS, find_model
from torchtitan.models.interface import LanguageModel
from torchtitan.models.settings import ModelSection
from torchtitan.models.sizes import RopeScaling
from torchtitan.models.spec import ModelSpec
from torchtitan.optim.loss import build_loss

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GLM = {"attention_bias": True, "n_routed_experts": 8, "num_experts_per_tok": 3}
GLM |= {"moe_intermediate_size": 24, "rope_theta": 100.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 8, "num_experts_per_tok": 3},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 20, "num_hidden_layers": 7},
    "mixtral": {"sliding_window": 8, "num_local_experts": 5},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "rope_scaling": YARN},
    "phi3": {"sliding_window": 8},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 4.0},
    "glm4_moe": {**GLM, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    "glm4_moe of plain heads": {**GLM, "partial_rotary_factor": 0.4, "n_group": 4, "topk_group": 2},
}


def read(folder: Path) -> tuple[LanguageModel, ModelSpec]:
    """Read the model of a folder."""
    config = read_config(folder)
    spec = family_of(config, models=MODELS)
    architecture = architecture_of(config, spec=spec)
    model = spec.build_meta(architecture).to_empty(device="cpu")
    weights = open_folder(folder, spec=spec, architecture=architecture, group=None)
    weights.read(dict(model.named_parameters()))
    assert model.output is not None
    model.output.loss = build_loss(None)
    return model, spec


def write(model: LanguageModel, spec: ModelSpec, folder: Path, **more: Any) -> Path:
    """Export a model."""
    writer = dcp.FileSystemWriter(folder / "step" / "model")
    dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    settings = HFExport(
        names=Names(spec.hf, model.config), carried=dict.fromkeys(TOKEN_IDS), **more
    )
    export(folder / "step", folder / "out", settings=settings, group=None)
    return folder / "out"


@pytest.mark.promise("hf", "round-trip")
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    theirs = write_folder(tmp_path / "theirs", family, **FAMILIES[family])
    ours, spec = read(tmp_path / "theirs")
    out = write(ours, spec, tmp_path)
    stored, written = (load_file(f / "model.safetensors") for f in (tmp_path / "theirs", out))
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[name], written[name]) for name in stored)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert type(again) is type(theirs)
    tokens, _ = batch(0)
    expected = theirs(tokens).logits
    assert torch.equal(again(tokens).logits, expected)
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-5, atol=1e-5)
    assert sizes_of(read(out)[0].config, spec.hf) == sizes_of(ours.config, spec.hf)


@pytest.mark.promise("hf")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient(family: str, tmp_path: Path) -> None:
    theirs = write_folder(tmp_path / "theirs", family, **FAMILIES[family])
    ours, spec = read(tmp_path / "theirs")
    tokens, labels = batch(0)
    theirs(tokens, labels=labels, shift_labels=labels).loss.backward()
    (ours(tokens, labels=labels) / labels.numel()).backward()
    for parameter in (*theirs.parameters(), *ours.parameters()):
        if parameter.requires_grad:
            parameter.data = parameter.grad  # and written as weights, under the same names
    theirs.save_pretrained(tmp_path / "gradients")
    expected = load_file(tmp_path / "gradients" / "model.safetensors")
    for name, gradient in load_file(write(ours, spec, tmp_path) / "model.safetensors").items():
        difference = (gradient - expected[name]).norm()
        assert difference <= 1e-5 * expected[name].norm() + 1e-8, name


@pytest.mark.promise("hf")
@pytest.mark.slow(gate=["gemma3_text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_steps(family: str, tmp_path: Path) -> None:
    theirs = write_folder(tmp_path, family, **FAMILIES[family])
    ten_steps(theirs, read(tmp_path)[0])


def test_adapters_of_a_fused_tensor(tmp_path: Path) -> None:
    theirs = write_folder(tmp_path / "theirs", "phi3")
    ours, spec = read(tmp_path / "theirs")
    settings = LoRAConfig(rank=3, alpha=6.0, modules=("layers.*.w[qv13]",))
    apply_lora(ours, settings=settings, names={})
    for name, parameter in ours.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.1)
    adapter = AdapterExport(settings=settings, merge=True)
    out = write(ours, spec, tmp_path, adapter=adapter)
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens, _ = batch(0)
    torch.testing.assert_close(merged(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged(tokens).logits, theirs(tokens).logits, atol=0.1)
    settings: dict[str, Any] = {"lora.rank": 3, "lora.export_format": "adapter"}
    settings |= {"model.name": "phi3", "checkpoint.last_save_in_hf": True}
    with pytest.raises(ConfigError, match=r"export_format.*Phi3ForCausalLM"):
        describe_export(load_config(**settings), dtype=None)


@pytest.mark.parametrize("num_rows", [127, 129])
def test_a_fused_tensor_has_the_rows_of_its_parameters(num_rows: int, tmp_path: Path) -> None:
    write_folder(tmp_path, "phi3")
    name, file = "model.layers.3.self_attn.qkv_proj.weight", tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(num_rows, 64)}, file)
    with pytest.raises(CheckpointError, match=rf"{name}.* 128 rows.*\[{num_rows}, 64\]"):
        read(tmp_path)


def change(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return partial(dict.update, **changes)


LINEAR = {"rope_type": "linear", "factor": 2.0}
LOCAL = {"full_attention": {}, "sliding_attention": {"type": "linear", "factor": 2.0}}
GLOBAL = ["full_attention"] * 7
V4 = {"rope_parameters": None, "rope_theta": 300.0}


@pytest.mark.promise("hf")
@pytest.mark.parametrize(
    ("family", "also"),
    [
        ("gemma3_text", {"layer_types": GLOBAL}),  # then no layer has the window
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}),
        ("gemma3_text", {**V4, "rope_local_base_freq": 50.0, "rope_scaling": LINEAR}),
        ("olmo3", {**V4, "rope_scaling": YARN}),
        ("olmo3", {"rope_parameters": None}),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3}),
        ("granite", {"residual_multiplier": 1.0}),
    ],
)
def test_other_forms_of_a_config(family: str, also: dict[str, Any], tmp_path: Path) -> None:
    """As transformers reads them."""
    write_folder(tmp_path, family, **FAMILIES[family])
    content = json.loads((tmp_path / "config.json").read_text()) | also
    content = {k: v for k, v in content.items() if v is not None or k == "pad_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens, _ = batch(0)
    ours = read(tmp_path)[0](tokens)
    torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "sizes", "can"),
    [
        ("gemma3", {"attention_scale": 0.4}, False),  # 1 / sqrt of no integer
        ("gemma3", {"layer_pattern": None}, False),  # the wavelengths would be others
        ("gemma3", {"layer_pattern": "G", "window": None}, True),
        ("gemma3", {"layer_pattern": "LN"}, False),
        ("gemma3", {"attention_scale": None}, True),
        ("granite", {"embedding_scale": None, "logits_divisor": None}, True),
        ("glm4_moe", {"expert_hidden_dim": None, "partial_rotary_factor": None}, True),
        ("phi3", {"rope_scaling": RopeScaling(type="linear", factor=2.0)}, False),
        ("qwen3_moe", {"num_shared_experts": 1}, False),
    ],
)
def test_an_export_says_what_it_cannot_store(name: str, sizes: dict[str, Any], can: bool) -> None:
    spec = MODELS[name]
    problem = find_inexpressible(replace(spec.flavors["tiny"], **sizes), spec.hf)
    assert (problem is None) == can, problem


@pytest.mark.parametrize(
    ("family", "wrong", "key"),
    [
        ("gemma3_text", change(layer_types=["full_attention"] * 3), "layer_types"),
        ("gemma3_text", change(layer_types=["chunked_attention"] * 7), "layer_types"),
        ("gemma3_text", change(sliding_window=None), "layer_pattern"),
        ("gemma3_text", change(final_logit_softcapping=30.0), "final_logit_softcapping"),
        ("gemma3_text", change(rope_parameters=LOCAL), "sliding_attention"),
        ("gemma3_text", change(rope_parameters={"sliding_attention": 5}), "object"),
        ("gemma3_text", change(rope_parameters={"rope_theta": 500.0}), "full_attention"),
        ("gemma3_text", change(rope_scaling=LINEAR), "rope_type"),  # beside the other table
        ("gemma3_text", change(layer_types=None, sliding_window_pattern=-2), "sliding_window_patt"),
        ("olmo2", change(rope_parameters={"full_attention": {}}), "full_attention"),
        ("olmo2", change(rope_parameters={"rope_theta": 1.0}), "rope_theta"),
        ("olmo3", change(original_max_position_embeddings=8), "original_max_position"),
        ("glm4_moe", change(attention_bias=None), "attention_bias"),
        ("gpt_oss", change(swiglu_limit=5.0), "swiglu_limit"),
        ("phi3", change(resid_pdrop=0.1), "resid_pdrop"),
        ("phi3", change(partial_rotary_factor=0.75, rope_parameters=None), "partial_rotary_factor"),
        ("phi3", change(rope_scaling={"type": "longrope"}, rope_parameters=None), "longrope"),
        ("phi3", change(rope_scaling=LINEAR, rope_parameters=None), "rope_type"),
        ("smollm3", change(no_rope_layers=[1, 0, 2, 0]), "no_rope_layers"),
        ("smollm3", change(layer_types=["sliding_attention"] * 4), "layer_types"),
        ("granite", change(logits_scaling=0.0), "logits_scaling"),
        ("mixtral", change(router_jitter_noise=0.1), "router_jitter_noise"),
        ("olmo2", change(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ("glm4_moe", change(rope_parameters={"partial_rotary_factor": 0.2}), "got 3 by 0.2"),
        ("glm4_moe", change(rope_parameters=None, partial_rotary_factor=0.1), "got 1 by 0.1"),
        ("glm4_moe", change(rope_parameters={"partial_rotary_factor": 0.01}), "got 0 by 0.01"),
        ("glm4_moe", change(rope_parameters={"partial_rotary_factor": 2}), "got 32 by 2"),
        ("glm4_moe", change(attention_bias=False), "attention_bias"),
        ("glm4_moe", change(use_qk_norm=False), "q_norm"),
    ],
)
def test_facts_that_do_not_fit(
    family: str, wrong: Callable[[dict[str, Any]], None], key: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, family, **FAMILIES[family])
    content = json.loads((tmp_path / "config.json").read_text())
    wrong(content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=key):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gemma3", {"layer_pattern": "LX"}),
        ("gemma3", {"layer_pattern": "LLG"}),  # of two layers
        ("gemma3", {"window": 0}),
        ("llama3", {"layer_pattern": "GN"}),
        ("llama3", {"logits_divisor": 2.0}),
        ("glm4_moe", {"partial_rotary_factor": 0.2}),  # 3 of 16
        ("gemma3", {"local_rope_theta": 0.5}),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}),
        ("qwen3_moe", {"qk_norm": False}),
    ],
)
def test_sizes_that_do_not_fit(name: str, sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        find_model(ModelSection(name=name, flavor="tiny", **sizes))


def test_layers_with_experts_follow_the_pattern_too() -> None:
    spec = MODELS["mixtral"]
    model = spec.build_meta(replace(spec.flavors["tiny"], layer_pattern="LG", window=5))
    assert [block.attention.window for block in model.layers.values()] == [5, None]


@pytest.mark.promise("hf")
def test_packed_experts_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Sixteen bytes and an exponent for 32 numbers: MXFP4."""
    write_folder(tmp_path, "gpt_oss", **FAMILIES["gpt_oss"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, width, rows = tensors[name].shape
        blocks = torch.randint(256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, (experts, rows, width // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    packed = {name for name in tensors if f"{name}_blocks" in tensors}
    kept = {n: t for n, t in tensors.items() if not n.endswith(("_blocks", "_scales"))}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = read(tmp_path)[0].state_dict()
    small = {name: tensor for name, tensor in tensors.items() if name not in packed}
    save_file(small, tmp_path / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = read(tmp_path)[0].state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    small.pop("model.layers.1.mlp.experts.down_proj_scales")
    save_file(small, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="down_proj_scales"):
        read(tmp_path)
