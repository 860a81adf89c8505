"""Latent attention and DeepSeek's router against `transformers`, and bugs planted in each.

transformers 5.23 leaves out groups by -inf, as DeepSeek's own code does; versions before 5 put 0.0
in the place of their scores, which a negative bias may fall below.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.models.reference import LATENT, VARIANTS, random_decoder, reference_of
from tests.models.reference import LATENT_NAMES as NAMES
from torchtitan.models.decoder import Decoder
from torchtitan.models.mla import LatentAttention
from torchtitan.models.moe import Router, best_experts
from torchtitan.models.rope import build_rope
from torchtitan.models.sizes import MLAConfig, RopeScaling

TOKENS = torch.randint(0, 263, (2, 70), generator=torch.Generator().manual_seed(2))
PAIRS = {"latent": LATENT, "latent, softmax": VARIANTS["latent, softmax"]}


def decoder(config: MLAConfig) -> Decoder:
    """With biases that change choices, latents so small that eps counts, and few near ties."""
    model = random_decoder(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("expert_bias"):
                parameter.normal_(std=0.3, generator=generator)
            elif "wkv_a" in name or "wq_a" in name:
                rank = config.kv_lora_rank if "wkv_a" in name else None
                parameter[:rank].mul_(5e-4)
    return model


def differing(config: MLAConfig, dtype: torch.dtype, rtol: float) -> dict[str, float]:
    """How far the logits and each gradient are from those of transformers, where by more."""
    model = decoder(config)
    reference = reference_of(model).to(dtype)
    reference.config._experts_implementation = "eager"  # the others take no float64
    model = model.to(dtype)
    found, expected = model(TOKENS), reference(TOKENS).logits
    for logits in (found, expected):
        logits.square().mean().backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    pairs = {"logits": (found.detach(), expected.detach())}
    for name, parameter in model.named_parameters():
        if name.endswith("expert_bias"):
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, name
        pairs[name] = parameter.grad, theirs_of(name, theirs)
    apart = {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}
    return {name: far for name, far in apart.items() if far > rtol}


def theirs_of(name: str, theirs: dict[str, Tensor | None]) -> Tensor:
    layer, _, rest = name.removeprefix("layers.").partition(".")
    if not name.startswith("layers."):
        layer, rest = "", name
    place = f"model.layers.{layer}." if layer else ""
    if rest.startswith("moe.experts."):
        w1, w3 = theirs[f"{place}mlp.experts.gate_up_proj"].chunk(2, dim=1)  # type: ignore[union-attr]
        w2 = theirs[f"{place}mlp.experts.down_proj"]
        grad: Tensor | None = {"w1": w1, "w2": w2, "w3": w3}[rest.rpartition(".")[2]]
    else:
        key, _, kind = rest.rpartition(".")
        grad = theirs[f"{place}{NAMES[key]}.{kind}"]
    assert grad is not None
    return grad


@pytest.mark.promise("float64", "experts")
@pytest.mark.parametrize("name", PAIRS)
def test_logits_and_every_gradient_are_those_of_transformers(name: str) -> None:
    """In float64 but for what transformers does in float32: scores, norms, the rotation."""
    assert differing(PAIRS[name], torch.float64, 1e-5) == {}


def without_mscale(scaling: RopeScaling) -> float:
    return 1.0


def weighed_with_bias(
    self: Router, x_BSC: Tensor, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    ids_BSK, _ = CORRECT(self, x_BSC, bias_E)
    assert bias_E is not None
    weights = (self.gate(x_BSC).sigmoid() + bias_E).gather(-1, ids_BSK)
    return ids_BSK, self.scale * weights / weights.sum(-1, keepdim=True)


def unbiased(self: Router, x_BSC: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return CORRECT(self, x_BSC)


def unscaled(self: Router, x_BSC: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    ids_BSK, weights_BSK = CORRECT(self, x_BSC, bias_E)
    return ids_BSK, weights_BSK / self.scale


def ungrouped(self: Router, x_BSC: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    self._best = partial(best_experts, num=LATENT.num_experts_per_token)
    return CORRECT(self, x_BSC, bias_E)


def unnormed(self: LatentAttention, config: MLAConfig) -> None:
    CORRECT_INIT(self, config)
    self.kv_norm.eps = config.norm_eps


def unshared(self: LatentAttention, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the shared channels comes from one head alone, as with a rank's own heads."""
    k_BHSD, v_BHSD = CORRECT_EXPAND(self, latent, k_pe)
    k_detached, _ = CORRECT_EXPAND(self, latent, k_pe.detach())
    return torch.cat((k_BHSD[:, :1], k_detached[:, 1:]), 1), v_BHSD


CORRECT, CORRECT_INIT = Router.forward, LatentAttention.__init__
CORRECT_EXPAND = LatentAttention.expand


@pytest.mark.promise("experts")
@pytest.mark.parametrize(
    ("owner", "name", "planted", "config"),
    [
        (RopeScaling, "score_growth", property(without_mscale), LATENT),
        (RopeScaling, "temperature", property(without_mscale), LATENT),
        (LatentAttention, "__init__", unnormed, dataclasses.replace(LATENT, norm_eps=1e-5)),
        (Router, "forward", weighed_with_bias, LATENT),
        (Router, "forward", unbiased, LATENT),
        (Router, "forward", unscaled, LATENT),
        (Router, "forward", ungrouped, LATENT),
    ],
)
def test_a_planted_bug_is_seen_in_the_logits(
    owner: type, name: str, planted: object, config: MLAConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differing(config, torch.float64, 1e-5) == {}
    monkeypatch.setattr(owner, name, planted)
    assert differing(config, torch.float64, 1e-3)["logits"] > 1e-3


def test_a_planted_bug_is_seen_in_the_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentAttention, "expand", unshared)
    found = differing(LATENT, torch.float64, 1e-3)
    assert "logits" not in found
    assert "layers.0.attention.wkv_a.weight" in found


def test_a_layer_is_what_the_paper_says() -> None:
    """Head by head and query by query, in float64, with YaRN's factors written out."""
    config = LATENT
    layer = random_decoder(config).double().layers["0"].attention
    assert isinstance(layer, LatentAttention)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 9, config.dim, dtype=torch.float64, generator=generator)
    rope = build_rope(
        torch.arange(9), head_dim=8, theta=config.rope_theta, scaling=config.rope_scaling
    )
    found = layer(x, rope)

    def normed(v: Tensor, norm: torch.nn.Module) -> Tensor:
        return v * (v.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight

    def turned(v: Tensor, position: int) -> Tensor:
        pairs = torch.view_as_complex(v.unflatten(-1, (-1, 2)).contiguous())
        spin = torch.complex(rope.cos[position].double(), rope.sin[position].double())
        return torch.view_as_real(pairs * spin).flatten(-2)

    growth = 0.1 * 0.5 * torch.tensor(8.0).log() + 1  # mscale_all_dim 0.5, factor 8
    q = normed(x[0] @ layer.wq_a.weight.T, layer.q_norm) @ layer.wq_b.weight.T
    latent, k_pe = (x[0] @ layer.wkv_a.weight.T).split((16, 8), -1)
    kv = normed(latent, layer.kv_norm) @ layer.wkv_b.weight.T
    out = torch.zeros(9, config.num_heads, 10, dtype=torch.float64)
    for head in range(config.num_heads):
        q_h, kv_h = q[:, 20 * head : 20 * (head + 1)], kv[:, 22 * head : 22 * (head + 1)]
        for i in range(9):
            scores = [
                q_h[i, :12] @ kv_h[j, :12] + turned(q_h[i, 12:], i) @ turned(k_pe[j], j)
                for j in range(i + 1)
            ]
            weights = (torch.stack(scores) * growth**2 / 20**0.5).softmax(0)
            out[i, head] = weights @ kv_h[: i + 1, 12:]
    expected = out.flatten(1) @ layer.wo.weight.T
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-6)
