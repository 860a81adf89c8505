"""A dataset read once, each sample exactly once, in whole batches over all ranks.

The number of samples is seldom a multiple of the batch over all ranks. Leaving samples out, or
counting some twice, would make the mean depend on the number of ranks. So the last batch is filled
with samples without labels: they add nothing to the loss, and every rank takes part in every batch.
"""

from __future__ import annotations

import torch

from torchtitan.data.dataset import IGNORED
from torchtitan.data.loader import Numbered, Samples


class WholeBatches:
    """The first samples of `dataset`, filled up to whole batches with samples without labels.

    `batch`: samples per batch over all ranks; `num_batches`: the most to read, None reads all.
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
