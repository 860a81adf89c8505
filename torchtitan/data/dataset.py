"""The samples of a run, numbered in training order.

`dataset[k]` is the k-th sample of the run, on any rank of any layout. A `Dataset` decides the
order: `sampler.py` computes from k which source the sample comes from, and its number in that
source. A `Source` makes the sample: of text (`documents.py`), of fine-tuning examples
(`finetune/data.py`) or of custom code (`custom.py`).

A dataset holds only file names and numbers, so it is cheap to send to worker processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import DataError, Violation
from torchtitan.base.files import Once, alone
from torchtitan.data.holdout import Holdout
from torchtitan.data.sampler import Draw, Inverse, Mixture, Permutation
from torchtitan.data.settings import SUPERVISED

if TYPE_CHECKING:
    from torchtitan.data.loader import MapSamples, Samples
    from torchtitan.data.settings import TrainingConfig
    from torchtitan.data.store import TokenStore
    from torchtitan.data.tokenizer import Tokenizer

# part of the fingerprint: another algorithm of the order is other data
ORDER = "1"
IGNORED = -100


class Source(Protocol):
    """Samples numbered from 0, in the order of the files."""

    num_samples: int

    @property
    def stores(self) -> Sequence[TokenStore]:
        """Return the stores that samples are read from."""

    def __getitem__(self, i: int) -> Samples:
        """Return `tokens` and `labels`, int64 [S], and `document_lengths` if they are needed."""


class Dataset:
    """All samples of a run in training order; `dataset[k]` is `{"tokens", "labels"}`, int64 [S].

    If documents are separated, `document_lengths`, int64, holds the number of tokens of each
    document in the sample, cut at both ends of the sample.

    Samples are drawn from `sources` in proportion to `weights`. `fingerprint` names everything that
    decides samples and order, which a resumed run compares. The data end when a source was read
    `num_epochs` times; None: never.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        weights: Sequence[float] = (1.0,),
        seed: int,
        fingerprint: dict[str, str],
        num_epochs: int | None = None,
    ) -> None:
        self.sources, self._mixture, self._seed = list(sources), Mixture(weights), seed
        self.fingerprint = fingerprint
        self.num_samples: int | None = None
        if num_epochs is not None:
            self.num_samples = min(
                self._mixture.exhausted_after(i, num_samples=num_epochs * source.num_samples)
                for i, source in enumerate(sources)
            )

    def __getitem__(self, k: int) -> Samples:
        number, _, i = self.place_of(k)
        return self.sources[number][i]

    def place_of(self, k: int) -> tuple[int, int, int]:
        """Return the source of sample k, the epoch of that source, and the number in it."""
        draw = self._mixture[k]
        epoch, index = divmod(draw.index, self.sources[draw.source].num_samples)
        order = self._order(Permutation, draw.source, epoch)
        return draw.source, epoch, order[index]

    def number_of(self, source: int, epoch: int, i: int) -> int:
        """Return k, given the result of `place_of(k)`."""
        index = self._order(Inverse, source, epoch)[i]
        before = epoch * self.sources[source].num_samples
        return self._mixture.number_of(Draw(source, before + index))

    def epoch_of(self, source: int, k: int) -> int:
        """Return the epoch of a source after the first k samples."""
        return self._mixture.count(source, first=k) // self.sources[source].num_samples

    def _order(self, order: type[Permutation], source: int, epoch: int) -> Permutation:
        n = self.sources[source].num_samples
        return order(n, seed=self._seed, epoch=epoch, source=source)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sources."""
        return sum(store.num_tokens for store in self.stores)

    @property
    def stores(self) -> list[TokenStore]:
        """Return the stores of all sources."""
        return [store for source in self.sources for store in source.stores]


class PadToBatch:
    """The first samples of a dataset, padded to full batches with samples without labels.

    `batch` is the number of samples per batch over all ranks. At most `limit` samples are read;
    None: all.
    """

    def __init__(self, dataset: MapSamples, *, batch: int, limit: int | None = None) -> None:
        assert dataset.num_samples is not None, "validation data have an end"
        self._dataset = dataset
        self.num_drawn = min(dataset.num_samples, limit or dataset.num_samples)
        self.num_batches = -(-self.num_drawn // batch)
        self.num_samples: int | None = self.num_batches * batch
        self.fingerprint = dataset.fingerprint

    def __getitem__(self, k: int) -> Samples:
        if k < self.num_drawn:
            return self._dataset[k]
        sample = self._dataset[0]
        return {**sample, "labels": torch.full_like(sample["labels"], IGNORED)}


def has_document_lengths(training: TrainingConfig) -> bool:
    """Return whether samples have the lengths of their documents."""
    return training.attn_mask_type == "block_causal" or training.reset_positions


# imported when used: a run on text loads no Jinja
TEXT = "torchtitan.data.documents:build_text"
EXAMPLES = "torchtitan.finetune.data:build_examples"
CUSTOM = "torchtitan.data.custom:build_custom"


def build_samples(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    seed: int,
    holdout_fraction: float | None = None,
    held_out: bool = False,
    keys_of_validation: Collection[str] = ("holdout_fraction",),
    once: Once = alone,
) -> MapSamples:
    """Build the samples that the settings describe, tokenized first if necessary.

    `held_out` selects the fraction of the documents that is never trained on, see `Holdout`.
    Settings in `keys_of_validation` are of [validation], all others of [training]. `once` finds
    files in one process of this machine. Raises DataError if data are missing, empty, damaged or
    too short.
    """
    path, kwargs = TEXT, dict[str, Any](tokenizer=tokenizer, seed=seed)
    if is_import_path(training.dataset):
        path = CUSTOM
        if holdout_fraction is not None:
            rule = f"holds out text, and '{training.dataset}' is custom; set validation.dataset"
            raise DataError.at("validation.holdout_fraction", rule)
        kwargs["held_out"] = held_out
    else:
        kwargs |= {"holdout": Holdout(holdout_fraction, held_out=held_out), "once": once}
    if training.dataset in SUPERVISED:
        path = EXAMPLES
        kwargs["tokenizer_path"] = tokenizer_path
    module, _, function = path.partition(":")
    try:
        samples: MapSamples = getattr(import_module(module), function)(training, **kwargs)
    except DataError as error:
        is_of_validation = error.key in keys_of_validation
        raise error.within("validation" if is_of_validation else "training") from error
    return samples


def check_fills_batch(
    samples: MapSamples, training: TrainingConfig, *, global_batch: int, accumulation: int
) -> None:
    """Raise DataError if the samples do not fill one global batch."""
    if samples.num_samples is None or samples.num_samples >= global_batch:
        return
    # without accumulation the global batch is what the ranks read at once
    key = "local_batch_size" if accumulation == 1 else "global_batch_size"
    rule = (
        f"the data must fill a global batch of {global_batch} samples of {training.seq_len} "
        f"tokens, got {samples.num_samples} in num_epochs = {training.num_epochs}; add data, or "
        f"lower {key} or seq_len"
    )
    raise DataError(Violation((key, "seq_len"), rule).within("training"))
