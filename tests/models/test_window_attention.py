"""Windows of attention: against the textbook's mask in float64, and without its memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.models.test_document_attention import LENGTHS, tensors
from tests.parallel.test_context_attention import Watch, error, in_float64, results
from torchtitan.models import attention
from torchtitan.models.attention import causal_attention
from torchtitan.models.interface import Documents


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_WINDOW_BLOCK", 4)


@pytest.mark.promise("documents")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 26, 29])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_each_query_sees_its_window(
    window: int, num_kv_heads: int, lengths: tuple[tuple[int, ...], ...] | None
) -> None:
    documents = None if lengths is None else Documents(lengths)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        given = tensors(dtype, num_kv_heads=num_kv_heads)
        ours = results(partial(causal_attention, window=window), given, documents)
        exact = results(partial(in_float64, window=window), [x.double() for x in given], documents)
        for name in exact:
            # of a window of one token the weights are 1, whatever queries and keys
            if window == 1 and name in ("dq", "dk"):
                # so they are the difference of two equal dot products, of norms about 3: what
                # rounding leaves of it depends on the order in which a CPU adds
                assert float(ours[name].abs().max()) < 4 * tolerance
            else:
                assert error(ours[name], exact[name]) < tolerance, name


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", [None, 1, 5, 29])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_sink_takes_its_share(
    window: int | None, lengths: tuple[tuple[int, ...], ...] | None
) -> None:
    documents = None if lengths is None else Documents(lengths)
    found = []
    for attend, dtype in ((causal_attention, torch.float32), (in_float64, torch.float64)):
        given = [x.to(dtype) for x in tensors()]
        sinks_H = torch.linspace(-1, 2, given[0].shape[1], dtype=dtype, requires_grad=True)
        of_all = results(partial(attend, window=window, sinks_H=sinks_H), given, documents)
        assert sinks_H.grad is not None
        found.append(of_all | {"dsinks": sinks_H.grad})
    for name, exact in found[1].items():
        # the terms of a sink's gradient, one per query, cancel
        assert error(found[0][name], exact) < (5e-6 if name == "dsinks" else 1e-6), name


@pytest.mark.parametrize("window", [30, 31, 4096])
def test_a_window_of_the_sequence_changes_no_bit(window: int) -> None:
    for documents in (None, Documents(LENGTHS)):
        ours = results(partial(causal_attention, window=window), tensors(), documents)
        plain = results(causal_attention, tensors(), documents)
        assert all(torch.equal(ours[name], plain[name]) for name in plain)


@pytest.mark.promise("no-square")
@pytest.mark.parametrize("lengths", [None, (4096,), (4000, 96)])
def test_nothing_grows_with_the_square(lengths: tuple[int, ...] | None) -> None:
    q = torch.randn(1, 2, 4096, 8, requires_grad=True)
    k = torch.randn(1, 1, 4096, 8, requires_grad=True)
    documents = None if lengths is None else Documents((lengths,))
    with Watch() as watch:
        causal_attention(q, k, k, documents, window=100).sum().backward()
    assert 0 < watch.largest < 4096**2 / 64


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_the_kernel_for_lengths_is_told_the_window(
    lengths: tuple[tuple[int, ...], ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[list[int], int, tuple[int, int]]] = []

    def varlen(q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: object) -> Tensor:
        begins, _, longest, _ = rest
        told.append((begins.tolist(), longest, options["window_size"]))  # type: ignore
        return q

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "can_use_varlen", lambda q: True)
    documents = None if lengths is None else Documents(lengths)
    q, k, v, _ = tensors()
    assert causal_attention(q, k, v, documents, window=5).shape == q.shape
    whole = [0, 30, 60, 90] if lengths is None else [0, 7, 8, 30, 60, 61, 62, 90]
    assert told == [(whole, 30, (4, 0))]
