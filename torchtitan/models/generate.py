"""Text out: tokens drawn one after another, with a cache of keys and values.

The prompt runs through the model once and fills the cache; each further token costs one pass over
one token. Draws are made on the CPU from a generator of their own, so that a seed means the same
everywhere and sampling disturbs no other random state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan.base.errors import UserError
from torchtitan.models.attention import KVCache
from torchtitan.models.decoder import Decoder


@torch.inference_mode()
def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    eos_id: int | None = None,
) -> list[int]:
    """Continue a prompt and return the new tokens alone, `eos_id` included if it was drawn.

    At temperature 0 the likeliest token is taken. `top_k` draws from that many likeliest tokens.
    Raises UserError for settings without a meaning.
    """
    _check(model, prompt_ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k)
    assert model.tok_embeddings is not None, "a pipeline stage alone writes no text"
    weight = model.tok_embeddings.weight
    cache = KVCache(
        model.config,
        batch_size=1,
        max_len=len(prompt_ids) + max_new_tokens,
        device=weight.device,
        dtype=weight.dtype,
    )
    generator = torch.Generator().manual_seed(seed)
    new_ids: list[int] = []
    tokens = list(prompt_ids)
    while len(new_ids) < max_new_tokens:
        logits_BSV = model(torch.tensor([tokens], device=weight.device), cache=cache)
        logits_V = logits_BSV[0, -1].float().cpu()
        tokens = [_draw(logits_V, temperature=temperature, top_k=top_k, generator=generator)]
        new_ids += tokens
        if tokens[0] == eos_id:
            break
    return new_ids


def _draw(
    logits_V: torch.Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    """Pick one token."""
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        floor = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < floor, float("-inf"))
    probabilities_V = (logits_V / temperature).softmax(-1)
    return int(probabilities_V.multinomial(1, generator=generator))


def _check(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
) -> None:
    """Refuse what cannot be generated."""
    vocab_size = model.config.vocab_size
    mistakes = []
    if not prompt_ids:
        mistakes.append("the prompt must hold at least one token, got none; write some text")
    elif not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        mistakes.append(
            f"token ids must lie in 0..{vocab_size - 1}, the model's vocabulary, got "
            f"{min(prompt_ids)}..{max(prompt_ids)}; use the tokenizer that it was trained with"
        )
    if max_new_tokens < 1:
        mistakes.append(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not temperature >= 0:  # NaN too
        mistakes.append(f"temperature must be 0 (greedy) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        mistakes.append(f"top_k must be at least 1, got {top_k}; leave it out to draw from all")
    if mistakes:
        raise UserError("\n".join(mistakes))
