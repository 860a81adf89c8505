"""DeepSeek's folders: published sizes, biases in float32, layers that are not read, float8."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hf.test_folders import (
    change_config,
    change_tensors,
    equal,
    exported,
    flavor_of,
    imported,
    spec_of,
    theirs,
)
from tests.models.reference import LATENT, VARIANTS, random_decoder
from tests.naming import naming
from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.checkpoint.source import ParameterFilter
from torchtitan.hf.config import architecture_of, read_config, sizes_of
from torchtitan.hf.folder import open_folder
from torchtitan.hf.weights import ScaledMatrix
from torchtitan.job import load_config
from torchtitan.layout import find_layout
from torchtitan.models.families import MODELS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
V3 = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
V2_LITE = {
    **COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


@pytest.mark.parametrize(
    ("said", "family", "flavor"),
    [(V3, "deepseek_v3", "671B"), (V2_LITE, "deepseek_v2", "16B")],
    ids=["V3", "V2-Lite"],
)
def test_published_models_find_their_flavor(
    said: dict[str, Any], family: str, flavor: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert flavor_of(tmp_path) == (family, flavor)
    # what is left out, transformers fills in as in V3 itself
    if family == "deepseek_v3":
        short = {key: said[key] for key in ("architectures", "rope_scaling", *SAID_BY_ALL)}
        (tmp_path / "config.json").write_text(json.dumps(short))
        assert flavor_of(tmp_path) == (family, flavor)


SAID_BY_ALL = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scoring_func": "softmax"}, naming("scoring_func", "sigmoid", "softmax")),
        ({"topk_method": "greedy"}, naming("topk_method", "noaux_tc", "greedy")),
        ({"rope_interleave": False}, naming("rope_interleave", True, False)),
        ({"n_group": 3}, naming("num_experts", 3, 256)),
        ({"num_key_value_heads": 64}, naming(64, 128)),
        ({"qk_rope_head_dim": 63}, naming("qk_rope_head_dim", 63)),
        ({"routed_scaling_factor": "2"}, naming("routed_scaling_factor", "'2'")),
        ({"quantization_config": {"quant_method": "gptq"}}, naming("quant_method", "gptq")),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
            naming("weight_block_size", None),
        ),
    ],
)
def test_what_is_not_built_is_refused(
    changes: dict[str, Any], said: re.Pattern[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V3, **changes}))
    with pytest.raises(CheckpointError, match=said):
        flavor_of(tmp_path)


def test_what_is_not_there_is_said_by_a_number(tmp_path: Path) -> None:
    """No dense layer, no shared expert, no groups: 0, 0 and 1, and null for queries' latents."""
    none = {
        "num_dense_layers": None,
        "num_shared_experts": None,
        "num_expert_groups": None,
        "num_limited_groups": None,
        "q_lora_rank": None,
    }
    config = dataclasses.replace(LATENT, **none)
    folder = exported(random_decoder(config), tmp_path)
    said = json.loads((folder / "config.json").read_text())
    keys = ("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group", "q_lora_rank")
    assert [said[key] for key in keys] == [0, 0, 1, 1, None]
    assert said["num_nextn_predict_layers"] == 0
    assert "head_dim" not in said
    found = architecture_of(read_config(folder), spec=MODELS["deepseek_v3"])
    assert sizes_of(found, MODELS["deepseek_v3"].hf) == sizes_of(config, MODELS["deepseek_v3"].hf)
    assert (found.num_dense_layers, found.num_shared_experts) == (None, None)  # type: ignore[attr-defined]
    assert equal(imported(folder, config).state_dict(), random_decoder(config).state_dict())


@pytest.mark.promise("round-trip")
@pytest.mark.parametrize("variant", ["latent", "latent, softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_read_is_written_byte_for_byte(
    variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = VARIANTS[variant]
    folder = theirs(tmp_path / "theirs", config)
    found = load_file(folder / "model.safetensors")
    biases = [name for name in found if name.endswith("mlp.gate.e_score_correction_bias")]
    assert len(biases) == (2 if variant == "latent" else 0)
    found = {name: t if name in biases else t.to(dtype) for name, t in found.items()}
    save_file(found, folder / "model.safetensors")
    # trained in float32, and in 16 bits, of which the biases are none
    for kind in {torch.float32, dtype}:
        model = imported(folder, config)
        weights = {n: p for n, p in model.named_parameters() if "expert_bias" not in n}
        for parameter in weights.values():
            parameter.data = parameter.data.to(kind)
        out = exported(model, tmp_path / str(kind), dtype=dtype)
        written = load_file(out / "model.safetensors")
        assert equal(written, found)
        assert all(written[name].dtype == torch.float32 for name in biases)


def test_layers_that_predict_further_tokens_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = theirs(tmp_path, LATENT)

    def add(tensors: dict[str, Tensor]) -> None:
        last = {n: t for n, t in tensors.items() if n.startswith("model.layers.2.")}
        tensors |= {n.replace(".2.", ".3.", 1): t.clone() for n, t in last.items()}
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)

    change_tensors(add)(folder)
    with caplog.at_level(logging.INFO):
        model = imported(folder, LATENT)
    assert equal(model.state_dict(), random_decoder(LATENT).state_dict())
    [said] = [line for line in caplog.messages if "are not read" in line]
    assert "model.layers.3.eh_proj.weight" in said
    # other families have no such layers
    folder = theirs(tmp_path / "v2", VARIANTS["latent, softmax"])
    change_tensors(add)(folder)
    with pytest.raises(CheckpointError, match=naming(15, "layers.3.attention.kv_norm.weight")):
        imported(folder, VARIANTS["latent, softmax"])


def test_layers_that_the_job_lacks_are_no_layers_behind_the_last(tmp_path: Path) -> None:
    """Also where something is left out, so that names and shapes are compared in place of sizes."""
    folder = theirs(tmp_path / "theirs", LATENT)
    fewer = dataclasses.replace(LATENT, num_layers=LATENT.num_layers - 1)
    with pytest.raises(CheckpointError, match=r"layers\.2\.attention"):
        open_folder(
            folder,
            spec=MODELS["deepseek_v3"],
            architecture=fewer,
            filter=ParameterFilter(exclude=("output.weight",)),
            group=None,
        )


def in_float8(tensors: dict[str, Tensor], *, block: int) -> dict[str, Tensor]:
    """What they mean; the tensors become matrices in float8 with scales, but for the router's."""
    meant = dict(tensors)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in [*tensors.items()]:
        if tensor.ndim == 2 and "gate.weight" not in name and "embed" not in name:
            rows, cols = (ceil(n / block) for n in tensor.shape)
            scale = torch.rand(rows, cols, generator=generator) + 0.5
            quantized = tensor.to(torch.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale_inv"] = quantized, scale
            whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            meant[name] = quantized.float() * whole[: tensor.shape[0], : tensor.shape[1]]
    return meant


FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def float8_folder(folder: Path, *, block: int = 16) -> tuple[Path, dict[str, Tensor]]:
    theirs(folder, LATENT)
    state = load_file(folder / "model.safetensors")
    meant = in_float8(state, block=block)
    save_file(state, folder / "model.safetensors")
    change_config(quantization_config={**FLOAT8, "weight_block_size": [block, block]})(folder)
    return folder, meant


@pytest.mark.promise("hf")
@pytest.mark.parametrize("block", [1, 7, 16, 128])
def test_float8_is_multiplied_by_the_scales_of_its_blocks(block: int, tmp_path: Path) -> None:
    folder, meant = float8_folder(tmp_path / "float8", block=block)
    out = exported(imported(folder, LATENT), tmp_path)
    assert equal(load_file(out / "model.safetensors"), meant)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_any_part_of_a_matrix_in_float8(tmp_path: Path) -> None:
    """A shard may begin and end within a block."""
    weight = torch.randn(23, 19).to(torch.float8_e4m3fn)
    scale = torch.rand(ceil(23 / 4), ceil(19 / 6))
    blocks = scale.repeat_interleave(4, 0).repeat_interleave(6, 1)[:23, :19]
    whole, scaled = weight.float() * blocks, ScaledMatrix(weight, scale, block=(4, 6))
    for top in range(23):
        for bottom in range(top + 1, 24):
            for cols in (slice(0, 19), slice(5, 6), slice(6, 19), slice(7, 13)):
                rows = slice(top, bottom)
                assert torch.equal(scaled[rows, cols], whole[rows, cols])


GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change_tensors(lambda t: t.pop(f"{GATE}_scale_inv")), f"'{GATE}_scale_inv'"),
        (
            change_tensors(lambda t: t.update({f"{GATE}_scale_inv": torch.ones(3, 3)})),
            r"\[6, 2\], .* F32 \[3, 3\]",
        ),
        (change_config(quantization_config=None), "F8_E4M3"),
    ],
)
def test_scales_that_do_not_fit_are_refused(damage: Any, said: str, tmp_path: Path) -> None:
    folder, _ = float8_folder(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        open_folder(folder, spec=spec_of(LATENT), architecture=LATENT, group=None)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("deepseek_v3", {"flavor": "16B"}, "expert_score must be sigmoid, got softmax"),
        (
            "deepseek_v2",
            {"num_expert_groups": "2", "num_limited_groups": "1"},
            "num_expert_groups must be None, got 2",
        ),
        ("qwen3_moe", {"expert_score": "sigmoid"}, "expert_score must be softmax, got sigmoid"),
    ],
)
def test_what_no_config_would_say_is_not_exported(
    name: str, sizes: dict[str, str], said: str, tmp_path: Path
) -> None:
    options = {"flavor": "tiny", **sizes}
    job = [f"--model.{key}={value}" for key, value in options.items()]
    job += [f"--model.name={name}", "--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    config = load_config([*job, f"--job.dump_folder={tmp_path}"])
    with pytest.raises(ConfigError) as error:
        find_layout(config, world_size=1)
    assert "last_save_in_hf" in str(error.value)
    assert said in str(error.value)
