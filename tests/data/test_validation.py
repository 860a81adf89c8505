"""Whole batches of a data set: each sample once, and generated data that are held out."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.data.helpers import dataset_of, loader_of
from torchtitan.data.dataset import PadToBatch
from torchtitan.data.synthetic import synthetic_corpus


@pytest.mark.promise("validation")
@pytest.mark.parametrize(("degree", "batch"), [(1, 4), (3, 2), (2, 5), (7, 90)])
def test_every_sample_once_on_any_ranks(degree: int, batch: int, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, num_epochs=1, attn_mask_type="block_causal")
    total = dataset.num_samples
    assert total is not None
    assert total % (degree * batch)
    whole = PadToBatch(dataset, batch=degree * batch)
    seen: Counter[bytes] = Counter()
    num_batches = []
    for rank in range(degree):
        loader = loader_of(whole, batch=batch, rank=rank, degree=degree)
        for _ in range(2):  # the second time all again
            loader.rewind()
            steps = list(loader)
            num_batches.append(len(steps))
            for [samples] in steps:
                assert samples["tokens"].shape == (batch, 16)
                assert samples["document_lengths"].sum() == batch * 16
                for tokens, labels in zip(samples["tokens"], samples["labels"], strict=True):
                    if (labels != -100).any():
                        seen[tokens.numpy().tobytes()] += 1
        loader.close()
    expected = Counter(dataset[k]["tokens"].numpy().tobytes() for k in range(total))
    assert seen == Counter({tokens: 2 * count for tokens, count in expected.items()})
    assert set(num_batches) == {-(-total // (degree * batch))} == {whole.num_batches}


def test_the_first_batches(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, num_epochs=1)
    assert dataset.num_samples is not None
    some = PadToBatch(dataset, batch=6, limit=12)
    assert (some.num_drawn, some.num_batches, some.num_samples) == (12, 2, 12)
    assert all(torch.equal(some[k]["labels"], dataset[k]["labels"]) for k in range(12))
    more = PadToBatch(dataset, batch=6, limit=10**6)
    assert more.num_drawn == dataset.num_samples


def test_generated_text_is_held_out() -> None:
    def sentences(*, held_out: bool) -> list[str]:
        pieces = synthetic_corpus(held_out=held_out).pieces()
        return [s for piece in pieces for s in piece.text.strip().lower().split(". ")]

    known, others = set(sentences(held_out=False)), sentences(held_out=True)
    long = [sentence for sentence in others if len(sentence.split()) > 6]
    assert len(long) > 300
    assert sum(sentence in known for sentence in long) < 0.02 * len(long)
    words, pairs = set(), set()
    for sentence in known:
        row = sentence.rstrip(".").split()
        words |= set(row)
        pairs |= set(pairwise(row))
    for sentence in others:
        row = sentence.rstrip(".").split()
        assert set(row) <= words
        assert set(pairwise(row)) <= pairs | {(row[0], row[1])}
