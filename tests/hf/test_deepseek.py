"""DeepSeek's and GLM's folders: published sizes, biases in float32, extra layers, float8."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hf.test_folders import (
    change_config,
    equal,
    exported,
    flavor_of,
    imported,
    theirs,
)
from tests.models.reference import LATENT, VARIANTS
from torchtitan.hf.weights import ScaledMatrix

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

COMMON = json.loads("""{
"attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 0,
"eos_token_id": 1, "hidden_act": "silu", "initializer_range": 0.02, "kv_lora_rank": 512,
"max_position_embeddings": 163840, "moe_layer_freq": 1, "pretraining_tp": 1, "qk_nope_head_dim":
128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "seq_aux": true,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128
}""")
V3 = COMMON | json.loads("""{
"architectures": ["DeepseekV3ForCausalLM"], "ep_size": 1, "first_k_dense_replace": 3,
"hidden_size": 7168, "intermediate_size": 18432, "model_type": "deepseek_v3",
"moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
"norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
"q_lora_rank": 1536, "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
"quant_method": "fp8", "weight_block_size": [128, 128]}, "rope_scaling": {"beta_fast": 32,
"beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn",
"mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
"topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280
}""")
V2_LITE = COMMON | json.loads("""{
"architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048,
"intermediate_size": 10944, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
"n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
"num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
"num_key_value_heads": 16, "q_lora_rank": null, "rope_scaling": {"beta_fast": 32, "beta_slow":
1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn", "mscale": 0.707,
"mscale_all_dim": 0.707}, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group":
1, "topk_method": "greedy", "vocab_size": 102400
}""")
AIR = json.loads("""{
"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
"eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act":
"silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
"max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
"n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
"num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads":
8, "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
"rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
"tie_word_embeddings": false, "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": true,
"use_qk_norm": false, "vocab_size": 151552
}""")
GLM = AIR | json.loads("""{
"first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288,
"moe_intermediate_size": 1536, "n_routed_experts": 160, "num_hidden_layers": 92,
"routed_scaling_factor": 2.5, "use_qk_norm": true
}""")


@pytest.mark.parametrize(
    ("said", "family", "flavor"),
    [
        (V3, "deepseek_v3", "671B"),
        (V2_LITE, "deepseek_v2", "16B"),
        (AIR, "glm4_moe", "106B-A12B"),
        (GLM, "glm4_moe", "355B-A32B"),
    ],
    ids=["V3", "V2-Lite", "GLM-4.5-Air", "GLM-4.5"],
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
    extra = {"model.layers.3.eh_proj.weight": torch.ones(1)} if biases else {}  # is not read
    save_file({**found, **extra}, folder / "model.safetensors")
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
