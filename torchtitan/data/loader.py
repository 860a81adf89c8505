"""The samples of each optimizer step, cut to the share of one data-parallel rank.

A step at position P consumes samples P to P + G - 1 of the global order, G being the global batch.
They are cut into blocks of local_batch_size; rank r's a-th microbatch is block a * dp_degree + r.
So a step trains on the same samples for any number of ranks, workers or accumulation steps, and the
position is the whole state: a run resumes at the next sample in any layout. Samples in gaps
(`data/gaps.py`) are passed over, and the others keep their numbers and their order.

torchdata's StatefulDataLoader runs the workers and reads ahead. Its own state is not used: it is
valid only for one rank and one number of workers, and it counts batches.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.data.gaps import Gaps
from torchtitan.mesh.faults import PART_OF_TIMEOUT
from torchtitan.mesh.process_group import seconds_to_wait
from torchtitan.mesh.stop import StopRequest

if TYPE_CHECKING:
    from torchtitan.data.settings import DataLoaderConfig
    from torchtitan.data.store import TokenStore

Samples = dict[str, torch.Tensor]
"""`tokens` and `labels`, int64 (B, S); and, where documents are told apart, int64
`document_lengths` of all sequences in a row."""
SECONDS_BETWEEN_LOOKS = 1.0
"""How often a worker checks whether its trainer is alive."""


class Numbered(Protocol):
    """All samples of a run by their place in its order."""

    num_samples: int | None
    """None: the data never end."""
    fingerprint: dict[str, str]
    """What the samples and their order depend on, by name."""

    @property
    def stores(self) -> Sequence[TokenStore]:
        """Return the token stores that are read whole."""

    def __getitem__(self, k: int) -> Samples:
        """Return the k-th sample of the run, always the same."""


@runtime_checkable
class Streaming(Protocol):
    """Samples that are read one after another, from a state."""

    def state_at(self, position: int) -> dict[str, Any]:
        """Return the state before a sample that is not read yet."""

    def load_state(self, state: dict[str, Any], *, position: int) -> None:
        """Go on with a sample from the state before it."""


def accumulation_steps(global_batch_size: int, *, local_batch_size: int, dp: int) -> int:
    """Return the number of microbatches of a step on each data-parallel rank.

    Raises:
        ConfigError: The global batch is not a multiple of what the ranks read at once.
    """
    at_once = local_batch_size * dp
    if global_batch_size == -1:
        return 1
    if global_batch_size % at_once:
        nearest = max(1, round(global_batch_size / at_once)) * at_once
        rule = (
            f"must be a multiple of local_batch_size x data-parallel ranks = {local_batch_size} x "
            f"{dp} = {at_once}, got {global_batch_size}; try {nearest}"
        )
        keys = "training.global_batch_size", "training.local_batch_size"
        raise ConfigError.at(keys, rule)
    return global_batch_size // at_once


def num_steps(num_samples: int, *, position: int, gaps: Gaps, global_batch: int) -> int:
    """Return how many global batches the samples from `position` on fill."""
    return max(0, gaps.place(num_samples) - gaps.place(position)) // global_batch


@dataclass(frozen=True)
class Blocks:
    """The sample numbers of one rank's microbatches, from `position` to the last whole step."""

    position: int
    num_samples: int | None
    gaps: Gaps
    block: int
    accumulation: int
    dp_rank: int
    dp_degree: int

    def __iter__(self) -> Iterator[list[int]]:
        global_batch = self.block * self.accumulation * self.dp_degree
        stop = None if self.num_samples is None else self.gaps.place(self.num_samples)
        for start in count(self.gaps.place(self.position), global_batch):
            # all ranks end on the same step
            if stop is not None and start + global_batch > stop:
                return
            for a in range(self.accumulation):
                first = start + (a * self.dp_degree + self.dp_rank) * self.block
                yield [self.gaps.number(place) for place in range(first, first + self.block)]


class Loader:
    """Iterate over steps: each is the list of this rank's microbatches, `accumulation` of them.

    A microbatch is `Samples` of local_batch_size sequences, in host memory. Iteration ends on all
    ranks when less than a global batch is left. `on_sample` is called with the number and the
    tokens of each sample.
    """

    def __init__(
        self,
        dataset: Numbered,
        *,
        local_batch_size: int,
        accumulation: int,
        dp_rank: int,
        dp_degree: int,
        settings: DataLoaderConfig,
        position: int = 0,
        gaps: Gaps | None = None,
        on_sample: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        assert 0 <= dp_rank < dp_degree
        self.dataset, self._settings = dataset, settings
        self._block, self._accumulation = local_batch_size, accumulation
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._global_batch = local_batch_size * accumulation * dp_degree
        self._position, self._gaps, self._on_sample = position, gaps or Gaps(), on_sample
        self._batches: Iterator[Samples] | None = None
        self.stop: StopRequest | None = None  # ends waits for data

    @property
    def position(self) -> int:
        """Return the number behind all samples so far; what is read ahead does not count."""
        return self._position

    @property
    def exhausted(self) -> bool:
        """Return whether less than a global batch is left."""
        total = self.dataset.num_samples
        return total is not None and self._end_of_step() > total

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Samples]:
        step: list[Samples] = []
        try:
            while len(step) < self._accumulation and (batch := self._next_batch()) is not None:
                step.append(batch)
        except DataError as error:
            # from a worker it comes with a traceback that ends in the message
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from error
        if not step:
            raise StopIteration
        if self._on_sample is not None:
            numbers = (k for block in islice(self._blocks(), self._accumulation) for k in block)
            drawn = (tokens for batch in step for tokens in batch["tokens"])
            for number, tokens in zip(numbers, drawn, strict=True):
                self._on_sample(number, tokens)
        self._position = self._end_of_step()
        return step

    def _next_batch(self) -> Samples | None:
        """Return the next microbatch; None: there is none."""
        limit = PART_OF_TIMEOUT * seconds_to_wait() if self.stop else 0.0
        with self.stop.waiting(limit, describe=self._describe) if self.stop else nullcontext():
            if self._batches is None:
                self._batches = batches = iter(self._start())
                if self._settings.num_workers:
                    # not by its setting, which would limit the start of a worker too
                    batches._timeout = SECONDS_BETWEEN_LOOKS
            while True:
                try:
                    return next(self._batches, None)
                except RuntimeError as error:
                    # torchdata 0.11 has no class for it; asked again, it waits on
                    if not str(error).startswith("DataLoader timed out"):
                        raise
                if self.stop:
                    self.stop.look()

    def _describe(self) -> str:  # who owes the data
        if self._settings.num_workers:
            workers = ", ".join(str(each.pid) for each in multiprocessing.active_children())
            return f"no data from its data workers (processes {workers})"
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
        own = [f for f in stack if not f.filename.startswith((sys.prefix, sys.base_prefix))]
        at = (own or stack)[-1]
        return f"the dataset is still in {at.name}, {at.filename}:{at.lineno}"

    def _end_of_step(self) -> int:
        """Return the number behind the last sample of the next step."""
        gaps = self._gaps
        return gaps.number(gaps.place(self._position) + self._global_batch - 1) + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the fingerprint of the data, equal on all ranks."""
        state = {"position": self._position, "fingerprint": dict(self.dataset.fingerprint)}
        if isinstance(self.dataset, Streaming):
            state["stream"] = self.dataset.state_at(self._position)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a stored position; raise DataError if the data differ."""
        stored, ours = state["fingerprint"], self.dataset.fingerprint
        differing = [key for key in {**stored, **ours} if stored.get(key) != ours.get(key)]
        if differing:
            changes = "; ".join(
                f"{key}: was {_short(stored.get(key))}, is {_short(ours.get(key))}"
                for key in differing
            )
            raise DataError(
                f"a run must resume on the data it was started on, but this differs: {changes}; "
                f'restore it, or begin with the first sample: checkpoint.mode = "continue" with '
                f'exclude_from_loading = ["dataloader"], or start a new run in another '
                f"job.dump_folder"
            )
        self.close()
        self._position = state["position"]
        if isinstance(self.dataset, Streaming):
            self.dataset.load_state(state["stream"], position=self._position)

    def rewind(self) -> None:
        """Go back to the first sample."""
        self.close()
        self._position = 0

    def close(self) -> None:
        """End the workers; the next step starts new ones at the position."""
        # the last reference: the iterator joins its workers when it is deleted
        self._batches = None

    def _blocks(self) -> Blocks:
        return Blocks(
            position=self._position,
            num_samples=self.dataset.num_samples,
            gaps=self._gaps,
            block=self._block,
            accumulation=self._accumulation,
            dp_rank=self._dp_rank,
            dp_degree=self._dp_degree,
        )

    def _start(self) -> StatefulDataLoader[Any]:
        settings = self._settings
        with warnings.catch_warnings():
            # torchdata calls a function that torch 2.13 deprecates
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            return StatefulDataLoader(
                self.dataset,
                collate_fn=_collate,
                batch_sampler=self._blocks(),
                num_workers=settings.num_workers,
                persistent_workers=settings.persistent_workers,
                prefetch_factor=settings.prefetch_factor,
                pin_memory=settings.pin_memory and torch.cuda.is_available(),
                multiprocessing_context=_worker_context() if settings.num_workers else None,
                worker_init_fn=partial(_end_with_trainer, os.getpid()),
                # not the global generator: its draws would differ after a resume
                generator=torch.Generator().manual_seed(0),
            )


def _collate(samples: list[Samples]) -> Samples:
    """Put samples into a batch; each has its own number of documents."""
    return {
        key: (torch.cat if key == "document_lengths" else torch.stack)([s[key] for s in samples])
        for key in samples[0]
    }


def _worker_context() -> BaseContext:
    """Return how to start workers: never by forking this process, with its CUDA and threads."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # torch is imported once, in the server that all workers are forked from
    context.set_forkserver_preload([__name__])
    _start_server_without_signals()
    return context


def _start_server_without_signals() -> None:
    # A signal to the whole job, or Ctrl-C, would end the workers during the step that the ranks
    # want to finish. Workers inherit the blocked signals, and end when their rank ends.
    blocked = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # starting it has unblocked some of them
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_trainer(trainer: int, worker: int) -> None:
    # torch's workers watch their parent, here the server, which survives when a rank is killed
    def watch() -> None:
        asked = False
        while _is_alive(trainer) and not asked:
            asked = _is_asked_to_end(by=trainer)
        os._exit(1)

    threading.Thread(target=watch, name="trainer watch", daemon=True).start()


def _is_asked_to_end(*, by: int) -> bool:
    """Wait a moment for a SIGTERM from this process.

    A worker blocks all others, but its trainer ends its workers by SIGTERM at exit and joins them.
    """
    if sys.platform != "linux":
        time.sleep(SECONDS_BETWEEN_LOOKS)
        return False
    signal_info = signal.sigtimedwait([signal.SIGTERM], SECONDS_BETWEEN_LOOKS)
    return signal_info is not None and signal_info.si_pid == by


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")  # of Linux: Z is one that ended and nobody waited for
        return not stat.exists() or stat.read_text().rpartition(") ")[2][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def _short(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= 32 else f"{value[:16]}..."
