"""Text out: tokens drawn one after another, with a cache of keys and values.

Each prompt runs through the model once and fills its part of the cache; each further token costs
one pass over one token of every text that goes on. Prompts of different lengths need no padding:
each has its own positions and its own keys, so a text is the one that its prompt gives alone.

Draws are made on the CPU from a generator for each text, so that a seed means the same everywhere,
whatever else is in the batch, and sampling disturbs no other random state. Under tensor parallelism
every rank draws by itself, from logits that were gathered and are the same bits on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, TypedDict

import torch

from torchtitan.base.errors import UserError
from torchtitan.models.attention import KVCache
from torchtitan.models.interface import LanguageModel

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Sampling(TypedDict, total=False):
    """How tokens are drawn: the keywords of `draw`, and of all that draws by it."""

    max_new_tokens: int
    """At most; 200 by default."""
    temperature: float
    """0: the likeliest token; 1.0 by default."""
    top_k: int | None
    """Draw from that many likeliest tokens; None: from all."""
    seed: int
    """Of the draws, the same for each prompt; 0 by default."""


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Collection[int] = (),
    is_over: Callable[[Sequence[int]], bool] | None = None,
    **sampling: Unpack[Sampling],
) -> list[list[int]]:
    """Continue each prompt and return the new tokens alone, one of `stop_ids` included if drawn.

    `is_over` tells by the new tokens of a text whether it ends with them. Raises UserError for
    settings without a meaning.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    for number, token in draw(model, prompts, stop_ids=stop_ids, is_over=is_over, **sampling):
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
    is_over: Callable[[Sequence[int]], bool] | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield each new token as it is drawn, after the number of its prompt; for `is_over` see
    `generate`.

    Raises UserError for settings without a meaning.
    """
    for prompt in prompts:
        _check(model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k)
    assert model.tok_embeddings is not None, "a pipeline stage alone writes no text"
    device = model.tok_embeddings.weight.device
    cache = KVCache(model.config, max_lens=[len(prompt) + max_new_tokens for prompt in prompts])
    generators = [torch.Generator().manual_seed(seed) for _ in prompts]
    texts: list[list[int]] = [[] for _ in prompts]

    def step(
        numbers: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Generator[tuple[int, int], None, dict[int, int]]:
        """Feed the next tokens of some texts and draw one more for each; return those of the texts
        that go on."""
        logits_BSV = model(torch.tensor(tokens, device=device), cache=cache.of(numbers))
        logits_BV = logits_BSV[:, -1].float().cpu()
        if logits_BV.isnan().any():
            raise UserError(
                f"the model's logits must be numbers, got NaN in {logits_BSV.dtype}; compute in "
                f"another type, bfloat16 or float32, or take another checkpoint"
            )
        going_on = {}
        for number, logits_V in zip(numbers, logits_BV, strict=True):
            generator = generators[number]
            token = _draw_one(logits_V, temperature=temperature, top_k=top_k, generator=generator)
            yield number, token
            text = texts[number]
            text.append(token)
            ends = token in stop_ids or (is_over is not None and is_over(text))
            if len(text) < max_new_tokens and not ends:
                going_on[number] = token
        return going_on

    last: dict[int, int] = {}
    for number, prompt in enumerate(prompts):
        last |= yield from step([number], [prompt])
    while last:
        last = yield from step([*last], [[token] for token in last.values()])


def _draw_one(
    logits_V: torch.Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    """Pick one token."""
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        floor = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < floor, float("-inf"))
    # less the largest, in float64: divided by a small temperature they would be too large to tell
    relative_V = (logits_V - logits_V.max()).double()
    probabilities_V = (relative_V / temperature).softmax(-1)
    return int(probabilities_V.multinomial(1, generator=generator))


def _check(
    model: LanguageModel,
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
    if not 0 <= temperature < inf:  # NaN too
        mistakes.append(f"temperature must be 0 (greedy) or a number above it, got {temperature}")
    if top_k is not None and top_k < 1:
        mistakes.append(f"top_k must be at least 1, got {top_k}; leave it out to draw from all")
    if mistakes:
        raise UserError("\n".join(mistakes))
