"""The samples of each optimizer step, cut to the share of one data-parallel rank.

A step at position P consumes samples P to P + G - 1 of the global order, where G is the global
batch. They are cut into blocks of local_batch_size; rank r's a-th microbatch is block a * dp_degree
+ r. So a step trains on the same samples for any number of ranks, workers or accumulation steps,
and the position is the state: a run resumes at the next sample in any layout. Only streams add a
state of their own. Skipped samples (`SkippedSamples`) are passed over; the order stays the same.

torchdata's StatefulDataLoader runs the workers and reads ahead. Its own state is not used: it is
valid only for one rank and one number of workers. A resumed run starts it at the position.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.data.sampler import SkippedSamples

if TYPE_CHECKING:
    from torchtitan.data.settings import DataLoaderConfig, TrainingConfig

Samples = dict[str, torch.Tensor]
"""`tokens` and `labels`, int64 (B, S). If documents are separated, also `document_lengths`, int64,
of all sequences in a row."""


class MapSamples(Protocol):
    """All samples of a run, numbered in training order."""

    num_samples: int | None
    """None if the data never end."""
    fingerprint: dict[str, str]
    """Everything that decides the samples and their order, by name."""

    def __getitem__(self, k: int) -> Samples:
        """Return the k-th sample of the run, always the same."""


@runtime_checkable
class StreamSamples(Protocol):
    """Samples that are read in order, starting from a state."""

    def state_at(self, position: int) -> dict[str, Any]:
        """Return the state before a sample that has not been read."""

    def load_state(self, state: dict[str, Any], *, position: int) -> None:
        """Continue at sample `position`, given the state before it."""


def accumulation_steps(global_batch_size: int, *, local_batch_size: int, dp: int) -> int:
    """Return the number of microbatches per step on each data-parallel rank; raise ConfigError if
    the global batch is not a multiple of the samples that all ranks read at once."""
    at_once = local_batch_size * dp
    if global_batch_size == -1:
        return 1
    if global_batch_size % at_once:
        nearest = max(1, round(global_batch_size / at_once)) * at_once
        keys = "training.global_batch_size", "training.local_batch_size"
        product = f"{local_batch_size} x {dp} = {at_once}"
        rule = (
            f"must be a multiple of local_batch_size x data-parallel ranks = {product}, got "
            f"{global_batch_size}; try {nearest}"
        )
        raise ConfigError.at(keys, rule)
    return global_batch_size // at_once


def plan_steps(
    training: TrainingConfig, samples: MapSamples, *, global_batch: int, step: int, position: int
) -> TrainingConfig:
    """Return the settings with the step that the run ends with as `steps`.

    It ends with `training.steps` or with its data, whichever comes first: `step` steps are done,
    and `position` is the number of the next sample.
    """
    if samples.num_samples is None:
        return training
    skipped = SkippedSamples(training.skip_samples)
    num_left = skipped.offset_of(samples.num_samples) - skipped.offset_of(position)
    last = step + max(0, num_left) // global_batch
    return replace(training, steps=last if training.steps == -1 else min(last, training.steps))


@dataclass(frozen=True)
class Blocks:
    """The sample numbers of one rank's microbatches, from `position` to the last full step."""

    position: int
    num_samples: int | None
    skipped: SkippedSamples
    block: int
    accumulation: int
    dp_rank: int
    dp_degree: int

    @property
    def global_batch(self) -> int:
        """Samples per step, on all ranks."""
        return self.block * self.accumulation * self.dp_degree

    @property
    def end_of_step(self) -> int:
        """Number after the last sample of the next step."""
        offset = self.skipped.offset_of(self.position)
        return self.skipped.number_at(offset + self.global_batch - 1) + 1

    def __iter__(self) -> Iterator[list[int]]:
        stop = None if self.num_samples is None else self.skipped.offset_of(self.num_samples)
        for start in count(self.skipped.offset_of(self.position), self.global_batch):
            # all ranks end on the same step
            if stop is not None and start + self.global_batch > stop:
                return
            for a in range(self.accumulation):
                first = start + (a * self.dp_degree + self.dp_rank) * self.block
                yield [self.skipped.number_at(i) for i in range(first, first + self.block)]


class Loader:
    """Iterates over steps. Each step is the list of this rank's microbatches, in host memory.

    Iteration ends on all ranks when less than a global batch remains.
    """

    def __init__(
        self,
        dataset: MapSamples,
        *,
        local_batch_size: int,
        accumulation: int,
        dp_rank: int,
        dp_degree: int,
        settings: DataLoaderConfig,
        skipped: SkippedSamples | None = None,
    ) -> None:
        assert 0 <= dp_rank < dp_degree
        self.dataset, self._settings = dataset, settings
        self.on_sample: Callable[[int, torch.Tensor], None] | None = None
        """Called with number and tokens of each sample, if a callback has set it."""
        self._blocks = Blocks(
            position=0,
            num_samples=dataset.num_samples,
            skipped=skipped or SkippedSamples(),
            block=local_batch_size,
            accumulation=accumulation,
            dp_rank=dp_rank,
            dp_degree=dp_degree,
        )
        self._batches: Iterator[Samples | DataError] | None = None
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Limits the wait for data, and may end it with an error. The position stays the same."""

    @property
    def position(self) -> int:
        """Return the number after the last consumed sample. Read-ahead does not count."""
        return self._blocks.position

    @property
    def exhausted(self) -> bool:
        """Return whether less than a global batch remains."""
        total = self.dataset.num_samples
        return total is not None and self._blocks.end_of_step > total

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Samples]:
        with self.waiting():
            if self._batches is None:
                self._batches = iter(self._start())
            step = []
            for batch in islice(self._batches, self._blocks.accumulation):
                if isinstance(batch, DataError):
                    raise batch
                step.append(batch)
        if not step:
            raise StopIteration
        if self.on_sample is not None:
            numbers = chain.from_iterable(islice(self._blocks, self._blocks.accumulation))
            samples = (tokens for batch in step for tokens in batch["tokens"])
            for number, tokens in zip(numbers, samples, strict=True):
                self.on_sample(number, tokens)
        self._blocks = replace(self._blocks, position=self._blocks.end_of_step)
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the fingerprint of the data, equal on all ranks."""
        state = {"position": self.position, "fingerprint": dict(self.dataset.fingerprint)}
        if isinstance(self.dataset, StreamSamples):
            state["stream"] = self.dataset.state_at(self.position)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a stored position; raise DataError if the data differ from the stored
        fingerprint."""
        stored, current = state["fingerprint"], self.dataset.fingerprint
        changes = [
            f"{key}: was {_short(stored.get(key))}, is {_short(current.get(key))}"
            for key in {**stored, **current}
            if stored.get(key) != current.get(key)
        ]
        if changes:
            raise DataError(
                f"a run must resume on the data it was started on, but this differs: "
                f"{'; '.join(changes)}; restore it, start at the first sample with "
                f'checkpoint.mode = "continue" and exclude_from_loading = ["dataloader"], or start '
                f"a new run in another job.dump_folder"
            )
        self._restart_at(state["position"])
        if isinstance(self.dataset, StreamSamples):
            self.dataset.load_state(state["stream"], position=self.position)

    def rewind(self) -> None:
        """Return to the first sample."""
        self._restart_at(0)

    def _restart_at(self, position: int) -> None:
        self.close()
        self._blocks = replace(self._blocks, position=position)

    def close(self) -> None:
        """End the workers. The next step starts new ones at the position."""
        # the last reference: the iterator joins its workers when it is deleted
        self._batches = None

    def _start(self) -> StatefulDataLoader[Samples | DataError]:
        settings = self._settings
        context = None
        if settings.num_workers:
            from torchtitan.data.workers import worker_context

            context = worker_context(preload=__name__)
        with warnings.catch_warnings():
            # torchdata calls a function that torch 2.13 deprecates
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            return StatefulDataLoader(
                _Batches(self.dataset),
                batch_size=None,
                sampler=self._blocks,
                collate_fn=_as_is,
                num_workers=settings.num_workers,
                persistent_workers=settings.persistent_workers,
                prefetch_factor=settings.prefetch_factor,
                multiprocessing_context=context,
                worker_init_fn=_init_worker,
                pin_memory=settings.pin_memory and torch.cuda.is_available(),
                # not the global generator: its draws would differ after a resume
                generator=torch.Generator().manual_seed(0),
            )


def _as_is(batch: Samples | DataError) -> Samples | DataError:
    return batch


def _init_worker(number: int) -> None:
    from torchtitan.data.workers import end_with_parent

    end_with_parent()


@dataclass(frozen=True)
class _Batches(Dataset[Samples | DataError]):
    """Reads the samples of a block as a batch.

    A DataError is returned: raised in a worker, it would arrive with a traceback.
    """

    samples: MapSamples

    def __getitem__(self, numbers: list[int]) -> Samples | DataError:
        try:
            rows = [self.samples[k] for k in numbers]
        except DataError as error:
            return error
        # document lengths differ in number
        join = {"document_lengths": torch.cat}
        return {key: join.get(key, torch.stack)([row[key] for row in rows]) for key in rows[0]}


def _short(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= 32 else f"{value[:16]}..."
