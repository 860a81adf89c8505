"""The KV cache: every query of a batch of other lengths, against attention to its own keys."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.models.reference import TINY
from torchtitan.models.attention import causal_attention
from torchtitan.models.cache import KVCache, LayerCache

HEADS, WIDTH = 4, 8
ONE_LAYER = dataclasses.replace(TINY, num_layers=1)


class Sequence(NamedTuple):
    """Queries, keys and values of one sequence, (1, heads, tokens, width)."""

    q: Tensor
    k: Tensor
    v: Tensor


def attention(window: int | None) -> dict[str, Any]:
    return {"attend_prompts": partial(causal_attention, window=window), "window": window}


def sequences(number: int, *, num_kv_heads: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(0)
    return [
        Sequence(
            *(
                torch.randn(1, n, 40, WIDTH, generator=generator)
                for n in (HEADS, num_kv_heads, num_kv_heads)
            )
        )
        for _ in range(number)
    ]


def expected(of: Sequence, at: int, window: int | None) -> Tensor:
    """What the query at a position sees, head by head in float64."""
    out = torch.zeros(HEADS, WIDTH, dtype=torch.float64)
    first = 0 if window is None else max(0, at + 1 - window)
    for head in range(HEADS):
        of_head = head * of.k.shape[1] // HEADS
        k, v = (x[0, of_head, first : at + 1].double() for x in (of.k, of.v))
        out[head] = (k @ of.q[0, head, at].double() / WIDTH**0.5).softmax(0) @ v
    return out


def step(layer: LayerCache, batch: list[Sequence], at: list[int], window: int | None) -> None:
    """Attend from one token of each sequence, and compare."""
    q, k, v = (
        torch.cat([x[:, :, i : i + 1] for x, i in zip(of, at, strict=True)])
        for of in zip(*batch, strict=True)
    )
    found = layer.attend(q, *layer.append(k, v), **attention(window))
    wanted = torch.stack([expected(of, i, window) for of, i in zip(batch, at, strict=True)])
    assert found.shape == (len(batch), HEADS, 1, WIDTH)
    torch.testing.assert_close(found[:, :, 0].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.promise("generation")
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("lengths", [[3, 12, 1, 7], [12, 4], [5, 5, 5], [9]])
def test_each_query_sees_its_own_sequence_alone(
    num_kv_heads: int, window: int | None, lengths: list[int]
) -> None:
    """Prompts of other lengths or of one, and after each drop of a sequence from the batch."""
    batch = sequences(len(lengths), num_kv_heads=num_kv_heads)
    cache = KVCache(ONE_LAYER, prompt_lens=lengths)
    assert cache.positions == [[at for length in lengths for at in range(length)]]
    layer = cache.layers["0"]
    q, k, v = (
        torch.cat([x[:, :, :length] for x, length in zip(of, lengths, strict=True)], dim=2)
        for of in zip(*batch, strict=True)
    )
    found = layer.attend(q, *layer.append(k, v), **attention(window))[0, :, cache.ends]
    last = [expected(of, n - 1, window) for of, n in zip(batch, lengths, strict=True)]
    torch.testing.assert_close(found.double(), torch.stack(last, 1), rtol=1e-5, atol=1e-6)
    cache.split(num_more=12)
    at = list(lengths)
    while batch:
        for _ in range(3):
            assert cache.positions == [[i] for i in at]
            step(cache.layers["0"], batch, at, window)
            at = [i + 1 for i in at]
        longest = max(range(len(at)), key=at.__getitem__)  # the columns of its padding go too
        del batch[longest], at[longest]
        if batch:
            cache.keep([row for row in range(len(batch) + 1) if row != longest])
            assert cache.layers["0"].length == max(at)
