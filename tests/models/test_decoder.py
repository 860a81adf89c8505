from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models.reference import TINY, VARIANTS, random_decoder, reference_of
from torchtitan.models.cache import KVCache
from torchtitan.models.decoder import Decoder, swiglu
from torchtitan.models.families import MODELS


def some_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 263, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.promise("float64")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_the_public_models(variant):
    model = random_decoder(VARIANTS[variant])
    reference = reference_of(model)
    tokens = some_tokens(3, 70)
    logits, expected = model(tokens), reference(tokens).logits
    # of the largest: each side rounds by up to 5e-6 (against itself in float64), and cosines and
    # sines, float32 on both sides and computed in two ways, are 1e-5 apart under YaRN
    atol = 2e-5 * float(expected.detach().abs().max())
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=atol)
    logits.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(
        model.tok_embeddings.weight.grad,
        reference.model.embed_tokens.weight.grad,
        rtol=1e-3,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_equals_plain_autograd_and_keeps_only_its_factors(dtype):
    given = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(3, 70, generator=given).to(dtype) for _ in range(3))
    found = []
    for function in (swiglu, lambda gate, up: F.silu(gate) * up):
        leaves = [x.clone().requires_grad_() for x in (gate, up)]
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(x.data_ptr()) or x, lambda x: x
        ):
            product = function(*leaves)
        product.backward(grad)
        found.append((product, *(x.grad for x in leaves)))
        own = set(kept) == {x.data_ptr() for x in leaves}
        assert own is (function is swiglu)
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.promise("generation")
@pytest.mark.parametrize("prompt", [1, 2, 11])
@pytest.mark.parametrize(
    "variant",
    [
        "scaled",
        "biased",
        "window",
        "experts",
        "latent",
        "latent, wide values",
        "gemma3",
        "gpt_oss",
        "smollm3",
    ],
)
@torch.no_grad()
def test_the_cache_changes_no_logit(prompt, variant):
    config = VARIANTS.get(variant) or MODELS[variant].flavors["tiny"]
    model = random_decoder(config)
    tokens = some_tokens(2, 20)
    cache = KVCache(model.config, prompt_lens=[prompt, prompt])
    parts = [model(tokens[:, :prompt].reshape(1, -1), cache=cache).transpose(0, 1)]
    cache.split(num_more=20 - prompt)
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(prompt, 20)]
    expected = model(tokens)[:, prompt - 1 :]  # those of a prompt before its last are not made
    atol = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=atol)
    with pytest.raises(AssertionError):  # it took all until here
        model(tokens[:, :1], cache=cache)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.promise("no-square")
def test_nothing_grows_with_the_square_of_the_sequence():
    model = random_decoder(dataclasses.replace(TINY, vocab_size=263))
    largest = {}
    for length in (1024, 2048):
        with LargestTensor() as mode:
            model(some_tokens(1, length)).sum().backward()
        largest[length] = mode.numel
    assert largest[1024] == 1024 * 263
    assert largest[2048] == 2048 * 263


def test_meta_construction_holds_the_parameters_and_nothing_else():
    with torch.device("meta"):
        model, tied = Decoder(TINY), Decoder(VARIANTS["tied"])
    assert not list(model.buffers())
    names = set(dict(model.named_parameters()))
    assert names == set(model.state_dict())
    assert names - set(dict(tied.named_parameters())) == {"output.weight"}
    assert {"layers.0.attention_norm.weight", "layers.1.feed_forward.w3.weight"} < names
    assert len(names) == 2 * 9 + 3
    tied.to_empty(device="cpu")
    tied.load_state_dict(random_decoder(VARIANTS["tied"]).state_dict())
    tokens = some_tokens(1, 8)
    assert torch.equal(tied(tokens), random_decoder(VARIANTS["tied"])(tokens))
