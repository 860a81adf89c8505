"""A data set read once, each sample exactly once, by ranks that all run the same batches.

The number of samples is seldom a multiple of what the ranks take at once, and no sample may be left
out or counted twice to make it one: the mean would shift with the number of ranks. So the last
batch is filled up with samples without labels. They cost a little time and count for nothing: a
rank that has no others still takes part in all that ranks do together.
"""

from __future__ import annotations

import torch

from torchtitan.data.dataset import IGNORED
from torchtitan.data.loader import Numbered, Samples


class WholeBatches:
    """The first samples of `dataset`, and as many without labels as make whole batches.

    `batch`: samples that all ranks take at once; `num_batches`: at most so many, None takes all.
    """

    def __init__(self, dataset: Numbered, *, batch: int, num_batches: int | None) -> None:
        assert dataset.num_samples is not None, "it is read to its end"
        self._dataset = dataset
        self.num_drawn = dataset.num_samples
        if num_batches is not None:
            self.num_drawn = min(self.num_drawn, num_batches * batch)
        self.num_batches = -(-self.num_drawn // batch)
        self.num_samples: int | None = self.num_batches * batch
        self.fingerprint, self.stores = dataset.fingerprint, dataset.stores

    def __getitem__(self, k: int) -> Samples:
        if k < self.num_drawn:
            return self._dataset[k]
        sample = self._dataset[0]
        return {**sample, "labels": torch.full_like(sample["labels"], IGNORED)}
