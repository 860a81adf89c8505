from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.reference import VARIANTS, random_decoder
from torchtitan.hf.config import TOKEN_IDS, new_config
from torchtitan.models import attention
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.models.interface import count, router_biases
from torchtitan.models.sizes import DecoderConfig, MLAConfig, MoEConfig, RopeScaling

FLAVORS = [(name, flavor) for name, spec in MODELS.items() for flavor in spec.flavors]
# from the public checkpoints
PUBLISHED = {
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("mistral", "7B-v0.1"): 7_241_732_096,
    ("mistral", "7B"): 7_248_023_552,
    ("mixtral", "8x7B"): 46_702_792_704,
    ("mixtral", "8x22B"): 140_630_071_296,
    ("phi3", "mini-4k"): 3_821_079_552,
    ("phi3", "phi-4"): 14_659_507_200,
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512,
    ("qwen2", "14B"): 14_770_033_664,
    ("qwen2", "32B"): 32_763_876_352,
    ("qwen2", "72B"): 72_706_203_648,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("gemma3", "270M"): 268_098_176,
    ("gpt_oss", "20B"): 20_914_757_184,
    ("gpt_oss", "120B"): 116_829_156_672,
    ("gemma3", "1B"): 999_885_952,
    ("smollm3", "3B"): 3_075_098_624,
    ("deepseek_v2", "16B"): 15_706_484_224,
    ("deepseek_v3", "671B"): 671_026_404_352 + 58 * 256,  # with the biases of the experts
    ("qwen3_moe", "30B-A3B"): 30_532_122_624,
    ("qwen3_moe", "235B-A22B"): 235_093_634_560,
}


@pytest.mark.promise("hf")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_parameters_are_those_of_the_public_model(name, flavor):
    config = MODELS[name].flavors[flavor]
    model = MODELS[name].build_meta(config)
    found = count(model).num_parameters
    if (name, flavor) in PUBLISHED:
        assert found == PUBLISHED[name, flavor]
        return
    with torch.device("meta"):
        no_ids = dict.fromkeys(TOKEN_IDS)
        content = new_config(config, format=MODELS[name].hf, dtype=torch.float32, carried=no_ids)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    biases = sum(bias.numel() for bias in router_biases(model))  # to transformers no parameters
    assert found - biases == theirs.num_parameters()


# torchtitan 0.2.2: dim, layers, heads, heads of keys, hidden, tied; read off its model arguments
TORCHTITAN = {
    ("llama3", "debugmodel"): (256, 6, 16, 16, 768, False),
    ("llama3", "8B"): (4096, 32, 32, 8, 14336, False),
    ("llama3", "70B"): (8192, 80, 64, 8, 28672, False),
    ("llama3", "405B"): (16384, 126, 128, 8, 53248, False),
    ("qwen3", "debugmodel"): (256, 8, 16, 8, 3072, True),
    ("qwen3", "0.6B"): (1024, 28, 16, 8, 3072, True),
    ("qwen3", "1.7B"): (2048, 28, 16, 8, 6144, True),
    ("qwen3", "4B"): (2560, 36, 32, 8, 9728, True),
    ("qwen3", "8B"): (4096, 36, 32, 8, 12288, False),
    ("qwen3", "14B"): (5120, 40, 40, 8, 17408, False),
    ("qwen3", "32B"): (5120, 64, 64, 8, 25600, False),
}


@pytest.mark.promise("surface")
@pytest.mark.parametrize(("name", "flavor"), TORCHTITAN)
def test_flavors_with_names_of_torchtitan_are_its_models(name, flavor):
    config = MODELS[name].flavors[flavor]
    dim, num_layers, num_heads, num_kv_heads, hidden_dim, tied = TORCHTITAN[name, flavor]
    vocab_size = {"llama3": 128_256, "qwen3": 151_936}[name] if flavor[-1] == "B" else 2048
    scaling = RopeScaling(type="llama3", factor=8.0, original_max_position=8192)
    family = {
        "llama3": {"rope_theta": 5e5, "rope_scaling": scaling, "norm_eps": 1e-5},
        "qwen3": {"rope_theta": 1e6, "norm_eps": 1e-6, "head_dim": 128, "qk_norm": True},
    }[name]
    assert config == DecoderConfig(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        hidden_dim=hidden_dim,
        vocab_size=vocab_size,
        tie_embeddings=tied,
        **family,
    )


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_those_of_forward_and_backward(variant, monkeypatch):
    monkeypatch.setattr(attention, "MIN_WINDOW_BLOCK", 1)  # not a key beside its window
    config = VARIANTS[variant]
    if isinstance(config, MLAConfig):  # nothing is filled up
        qk = config.qk_nope_head_dim + config.qk_rope_head_dim
        config = dataclasses.replace(config, v_head_dim=qk)
    model = random_decoder(config)
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    # the unfused kernel: two whole S x S products forward and four backward, as PaLM counts
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == tokens.numel() * count(model).flops_per_token(48)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 256, 4096])
@pytest.mark.parametrize("name", MODELS)
def test_the_first_loss_is_that_of_equal_probabilities(name: str, dim: int, tied: bool) -> None:
    flavor, vocab_size = MODELS[name].flavors["tiny"], 2048
    width = min(dim, 1024)
    sizes = {"dim": dim, "hidden_dim": 3 * width, "vocab_size": vocab_size, "tie_embeddings": tied}
    if isinstance(flavor, MoEConfig):
        sizes["expert_hidden_dim"] = width
    if not isinstance(flavor, MLAConfig):
        sizes |= {"num_heads": width // 32, "num_kv_heads": width // 64, "head_dim": 32}
    model = MODELS[name].build(dataclasses.replace(flavor, **sizes))
    initialize(model, seed=0)
    tokens = torch.randint(vocab_size, (2, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss < math.log(vocab_size) + 1
