"""Autoregressive sampling with a KV cache.

Prompts of similar length form a group. Its prompts run through the model once, one after another in
a row. Each further token costs one pass over one token per unfinished text. Each prompt has its own
positions, and no prompt sees the keys and values of another, so texts are independent.

Tokens are drawn on the CPU with one generator per text. So a seed gives the same text in any batch,
and sampling changes no other random state. Under tensor parallelism every rank draws for itself,
from gathered logits that are bit-identical on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, TypedDict

import torch

from torchtitan.base.errors import UserError
from torchtitan.models.cache import KVCache
from torchtitan.models.interface import LanguageModel

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Sampling(TypedDict, total=False):
    """Keyword arguments of `draw`, and of all functions that draw tokens."""

    max_new_tokens: int
    """Most tokens to draw per prompt. Default: 200."""
    temperature: float
    """Divisor of the logits. 0: the most likely token. Default: 1.0."""
    top_k: int | None
    """Number of most likely tokens to draw from. None: all."""
    seed: int
    """Seed of each text's generator. Default: 0."""


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Collection[int] = (),
    stops: Callable[[Sequence[int]], bool] | None = None,
    **sampling: Unpack[Sampling],
) -> list[list[int]]:
    """Return the tokens that continue each prompt, including a drawn stop token.

    `stops` returns whether a text ends, given its new tokens. Raises UserError if a prompt or
    setting is invalid, or the logits are NaN.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    for number, token in draw(model, prompts, stop_ids=stop_ids, stops=stops, **sampling):
        texts[number].append(token)
    return texts


@torch.no_grad()
def draw(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    stops: Callable[[Sequence[int]], bool] | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield the index of a prompt and its next token, as tokens are drawn; see `generate`."""
    _check(model, prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k)
    assert model.tok_embeddings is not None, "a pipeline stage cannot generate"
    device = model.tok_embeddings.weight.device
    generators = [torch.Generator().manual_seed(seed) for _ in prompts]
    texts: list[list[int]] = [[] for _ in prompts]

    def draw_next(
        numbers: Sequence[int], rows: Sequence[Sequence[int]], cache: KVCache
    ) -> Iterator[tuple[int, int]]:
        """Feed rows of tokens and draw one more for each of some texts."""
        logits = model(torch.tensor(rows, device=device), cache=cache)
        logits_BV = logits.flatten(0, 1).float().cpu()
        if logits_BV.isnan().any():
            raise UserError(f"logits are NaN in {logits.dtype}; use bfloat16 or float32")
        for number, logits_V in zip(numbers, logits_BV, strict=True):
            generator = generators[number]
            token = _draw_one(logits_V, temperature=temperature, top_k=top_k, generator=generator)
            texts[number].append(token)
            yield number, token

    def is_unfinished(number: int) -> bool:
        text = texts[number]
        is_stopped = text[-1] in stop_ids or (stops is not None and stops(text))
        return len(text) < max_new_tokens and not is_stopped

    for numbers in _group([len(prompt) + max_new_tokens - 1 for prompt in prompts]):
        cache = KVCache(model.config, prompt_lens=[len(prompts[number]) for number in numbers])
        row = [token for number in numbers for token in prompts[number]]
        yield from draw_next(numbers, [row], cache)
        cache.split(num_more=max_new_tokens - 1)
        while kept := [i for i, number in enumerate(numbers) if is_unfinished(number)]:
            if len(kept) < len(numbers):
                cache.keep(kept)
                numbers = [numbers[i] for i in kept]
            yield from draw_next(numbers, [texts[number][-1:] for number in numbers], cache)


def _group(lengths: Sequence[int]) -> list[list[int]]:
    """Return groups of indices. Padded to its longest, a group has at most twice its length."""
    groups: list[list[int]] = []
    total = 0
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        total += lengths[number]
        if not groups or (len(groups[-1]) + 1) * lengths[number] > 2 * total:
            groups.append([])
            total = lengths[number]
        groups[-1].append(number)
    return groups


def _draw_one(
    logits_V: torch.Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        floor = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < floor, float("-inf"))
    # relative to the largest, in float64: a small temperature would overflow other logits
    relative_V = (logits_V - logits_V.max()).double()
    probabilities_V = (relative_V / temperature).softmax(-1)
    return int(probabilities_V.multinomial(1, generator=generator))


def _check(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
) -> None:
    """Raise UserError for an invalid prompt or setting."""
    last_id = model.config.vocab_size - 1
    if not all(prompts):
        raise UserError("a prompt must have at least one token")
    if any(not 0 <= min(prompt) <= max(prompt) <= last_id for prompt in prompts):
        raise UserError(f"token ids must be in 0..{last_id}; use the model's tokenizer")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not 0 <= temperature < inf:  # NaN too
        raise UserError(f"temperature must be 0 or a positive number, got {temperature}")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k must be at least 1, got {top_k}")
