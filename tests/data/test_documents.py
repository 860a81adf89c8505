"""Where documents begin and end: from the store's index to the batch, against the text itself."""

from __future__ import annotations

import pickle
import tracemalloc
from itertools import accumulate, islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.helpers import SEQ_LEN, dataset_of, loader_of, write_texts
from tests.data.test_store import write_by_hand
from torchtitan.data import store as store_module
from torchtitan.data.dataset import Dataset
from torchtitan.data.store import TokenStore, open_writer

# an end token each, samples of 16: several in one, one over several, one that ends with its sample,
# one that begins with the last token of one
LETTERS = iter("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" * 4)
TEXTS = ["".join(islice(LETTERS, n)) for n in (3, 50, 8, 1, 2, 4, 4, 29, 50)]
EACH = [("causal", True), ("block_causal", False), ("block_causal", True)]


def boundaries(lengths: list[int], first: int, stop: int) -> list[int]:
    """By looking at every document."""
    starts = list(accumulate(lengths, initial=0))[:-1]
    return [s for s, n in zip(starts, lengths, strict=True) if n and first < s < stop]


def assert_boundaries(store: TokenStore, lengths: list[int]) -> None:
    total = sum(lengths)
    for first in range(total):
        for stop in range(first + 1, total + 1):
            assert store.boundaries(first, stop) == boundaries(lengths, first, stop)


def test_a_store_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that the writer cuts into several sequences are one; empty ones are none."""
    monkeypatch.setattr(store_module, "MAX_SEQUENCE", 4)
    lengths = [9, 0, 4, 5, 0, 0, 1, 12, 0]
    with open_writer(tmp_path / "ours", vocab_size=300) as writer:
        for length in lengths:
            writer.add(np.zeros(length), ends_document=True)
    store = TokenStore(tmp_path / "ours")
    assert len(store.lengths) > len(lengths)
    assert_boundaries(store, lengths)
    assert_boundaries(pickle.loads(pickle.dumps(store)), lengths)


@pytest.mark.promise("token-stores")
@pytest.mark.parametrize("code", [1, 4, 5, 8])
def test_a_store_of_megatrons(tmp_path: Path, code: int) -> None:
    """Several sequences to a document, and documents without one, at the end too."""
    documents = [[[1, 2, 3], [4]], [], [[5]], [[], []], [[6, 7], [8, 9, 10]], []]
    write_by_hand(tmp_path / "theirs", documents, code=code)
    assert_boundaries(TokenStore(tmp_path / "theirs"), [sum(map(len, d)) for d in documents])


def dataset(tmp_path: Path, attention: str = "block_causal", positions: bool = True) -> Dataset:
    lines = "".join(f'{{"text": "{text}"}}\n' for text in TEXTS)
    paths = write_texts(tmp_path / "text", {"texts.jsonl": lines})
    how = {"attn_mask_type": attention, "reset_positions": positions}
    return dataset_of(tmp_path, dataset_path=paths, num_epochs=1, **how)


@pytest.mark.promise("documents")
@pytest.mark.parametrize(("attention", "positions"), EACH)
def test_lengths_and_labels_of_samples(tmp_path: Path, attention: str, positions: bool) -> None:
    stream = [i for text in TEXTS for i in [*text.encode(), 257]]
    number = [n for n, text in enumerate(TEXTS) for _ in range(len(text) + 1)]
    ours = dataset(tmp_path, attention, positions)
    assert ours.num_samples == (len(stream) - 1) // SEQ_LEN
    seen = {}
    for k in range(ours.num_samples):
        item = ours[k]
        tokens, labels = item["tokens"].tolist(), item["labels"].tolist()
        [first] = [
            at
            for at in range(0, len(stream) - SEQ_LEN, SEQ_LEN)
            if stream[at : at + SEQ_LEN] == tokens
        ]
        held = number[first : first + SEQ_LEN + 1]
        assert item["document_lengths"].dtype == torch.int64
        ends = list(accumulate(item["document_lengths"].tolist()))
        assert ends == [i + 1 for i in range(SEQ_LEN) if i == SEQ_LEN - 1 or held[i] != held[i + 1]]
        wanted = [
            -100 if attention == "block_causal" and a != b else label
            for label, (a, b) in zip(
                stream[first + 1 : first + SEQ_LEN + 1], pairwise(held), strict=True
            )
        ]
        assert labels == wanted
        seen[first] = ends
    assert any(len(ends) == 1 for ends in seen.values())
    assert any(len(ends) > 2 for ends in seen.values())
    assert any(number[first + SEQ_LEN - 1] != number[first + SEQ_LEN] for first in seen)


@pytest.mark.promise("no-square")
def test_no_memory_grows_with_the_square(tmp_path: Path) -> None:
    """Of what Python and numpy take, to make a batch: far less than S squared / 64 bytes."""
    seq_len = 20_000
    how = {"dataset": "synthetic", "attn_mask_type": "block_causal", "seq_len": seq_len}
    loader = loader_of(dataset_of(tmp_path, **how), batch=1)  # type: ignore[arg-type]
    next(loader)
    tracemalloc.start()
    batch = next(loader)[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(batch["document_lengths"]) > 10
    assert 0 < peak < seq_len**2 / 64
