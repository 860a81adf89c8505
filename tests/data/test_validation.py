"""Whole batches of a data set: each sample once, and generated data that are held out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.data.helpers import dataset_of, loader_of
from torchtitan.data.dataset import PadToBatch


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
