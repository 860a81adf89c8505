"""Samples without labels that fill the last batch of a validation.

Each validation starts new data workers, which import this file, so it imports little.
"""

from __future__ import annotations

import torch

from torchtitan.data.dataset import IGNORED
from torchtitan.data.loader import MapSamples, Samples


class PadToBatch:
    """The first samples of a dataset, padded to full batches with samples without labels.

    Args:
        dataset: Samples with an end.
        batch: Samples per batch over all ranks.
        num_batches: Maximum number of batches. None reads all samples.
    """

    def __init__(self, dataset: MapSamples, *, batch: int, num_batches: int | None) -> None:
        assert dataset.num_samples is not None, "validation data have an end"
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
