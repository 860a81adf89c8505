"""Documents held out of training by a hash of their content: `validation.holdout_fraction`.

A split by position (the last files, every hundredth document) changes when data are added, and puts
copies of a document on both sides. Here a document is held out if the hash of its tokens is below a
threshold. So it stays on its side when other data change, its copies are on the same side, and a
larger fraction holds out the same documents and more. The hash does not depend on the seed, on the
type of the stored tokens, or on an end token after the document.

Nothing is copied. A `HoldoutView` reads the documents of one side from the stores as one row of
tokens. A table in the cache, mapped like a store, lists the runs of neighbouring documents of each
side. It is built once per store, by reading the store once.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError
from torchtitan.base.log import plural
from torchtitan.data.cache import cached
from torchtitan.data.files import file_identity
from torchtitan.data.store import CHUNK, TokenStore
from torchtitan.data.store_writer import StoreWriter

logger = logging.getLogger(__name__)

# part of the hash, so that other uses of it select other documents
PERSON = b"validation split"
# part of the cache's key: raise it if documents are divided differently
FORMAT = "split 1"


@dataclass(frozen=True)
class Holdout:
    """The documents that `validation.holdout_fraction` holds out, or the documents to train on."""

    fraction: float
    held_out: bool

    def selects(self, tokens: npt.NDArray[Any], *, end: int | None = None) -> bool:
        """Return whether a document is on this side, without the `end` token that may follow it."""
        below = content_number(tokens, end=end) < int(self.fraction * 2**64)
        return below == self.held_out

    def fingerprint(self) -> dict[str, str]:
        """Return what selects the samples of this side, keyed as in earlier checkpoints."""
        return {"validation.split": f"{self.fraction}{', held out' if self.held_out else ''}"}

    def log(
        self, name: str, *, num_held_out: int, counted: str, num_left: int, more: str = ""
    ) -> None:
        """Log what is held out of the data to train on."""
        logger.info(
            "%.200s: %d of %s are held out, %d are left to train on%s. validation.holdout_fraction "
            "= %s holds out with and without validation.enable: remove it to train on all",
            name,
            num_held_out,
            counted,
            num_left,
            more,
            self.fraction,
        )

    def too_small(self, *, needed: str, found: str) -> DataError:
        """Return the error for data with less than a sample on this side."""
        verb, change = ("hold out", "raise") if self.held_out else ("leave to train on", "lower")
        rule = (
            f"must {verb} at least {needed}, {self.fraction} gives {found}; {change} it, add "
            f"documents (a text file or a row is one, copies stay together), or name other files "
            f"in validation.dataset_path"
        )
        return DataError.at("holdout_fraction", rule)


def content_number(tokens: npt.NDArray[Any], *, end: int | None = None) -> int:
    """Return a 64-bit hash of a document's tokens, without the `end` token that may follow it."""
    if end is not None and len(tokens) and tokens[-1] == end:
        tokens = tokens[:-1]
    digest = blake2b(digest_size=8, person=PERSON)
    for first in range(0, len(tokens), CHUNK):
        # the same type for all stores
        digest.update(tokens[first : first + CHUNK].astype("<i4").tobytes())
    return int.from_bytes(digest.digest(), "little")


class HoldoutView:
    """The documents of one side of several stores, as one row of tokens.

    Args:
        stores: Stores that hold the documents of both sides.
        tables: The table of each store.
        held_out: Side to read.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        tables: Sequence[TokenStore],
        *,
        held_out: bool,
    ) -> None:
        self.stores: Sequence[TokenStore] = list(stores)
        self._tables, self._held_out = list(tables), held_out
        # the first token of each run in the view, then the number of all tokens
        self._firsts = [table.document(2 * held_out) for table in tables]
        # the first token of each run in the store
        self._places = [table.document(2 * held_out + 1) for table in tables]
        self._ends = list(accumulate(int(firsts[-1]) for firsts in self._firsts))
        self.prefix = ", ".join(store.prefix for store in stores)

    def __reduce__(self) -> tuple[object, ...]:
        # a worker process maps the files again
        return partial(HoldoutView, held_out=self._held_out), (self.stores, self._tables)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the documents of this side."""
        return self._ends[-1]

    def read(self, first: int, stop: int) -> npt.NDArray[Any]:
        """Return the tokens from `first` to `stop`, in their stored type."""
        return np.concatenate(
            [self.stores[n].tokens[begin:end] for n, begin, end in self.runs(first, stop)]
        )

    def boundaries(self, first: int, stop: int) -> list[int]:
        """Return the tokens after `first` and before `stop` that start a document."""
        starts: list[int] = []
        at = first
        for number, begin, end in self.runs(first, stop):
            if at > first:
                starts.append(at)
            within = self.stores[number].boundaries(begin, end)
            starts += [at + start - begin for start in within]
            at += end - begin
        return starts

    def content_hash(self) -> str:
        """Return the hashes of the stores, which cover both sides."""
        return "".join(store.content_hash() for store in self.stores)

    def place(self, number: int, token: int) -> int | None:
        """Return the position of a token of `stores[number]`, or None on the other side."""
        firsts, places = self._firsts[number], self._places[number]
        run = bisect_right(places, token) - 1
        if run < 0 or token - places[run] >= firsts[run + 1] - firsts[run]:
            return None
        return (self._ends[number - 1] if number else 0) + int(firsts[run] + token - places[run])

    def runs(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the tokens from `first` to `stop` as (index in `stores`, start, stop)."""
        while first < stop:
            number = bisect_right(self._ends, first)
            offset = self._ends[number - 1] if number else 0
            firsts = self._firsts[number]
            run = bisect_right(firsts, first - offset) - 1
            end = min(stop, offset + int(firsts[run + 1]))
            begin = int(self._places[number][run]) + first - offset - int(firsts[run])
            yield number, begin, begin + end - first
            first = end


def build_view(
    stores: Sequence[TokenStore],
    holdout: Holdout,
    *,
    name: str,
    seq_len: int,
    end: int,
    cache: str,
) -> HoldoutView:
    """Return the selected documents of several stores, divided now unless the cache has the tables.

    Args:
        stores: Stores to divide.
        holdout: Documents to select.
        name: Name of the stores for messages.
        seq_len: Tokens of a sample.
        end: Token after a document.
        cache: Folder of the tables.

    Raises:
        DataError: The selected documents have less than one sample.
    """
    tables: list[TokenStore] = []
    counts: Counter[str] = Counter()
    for store in stores:
        table, notes = _cached_table(store, holdout.fraction, end=end, cache=cache)
        tables.append(table)
        counts.update({key: notes[key] for key in ("to_train_on", "held_out")})
    view = HoldoutView(stores, tables, held_out=holdout.held_out)
    total, num_tokens = counts.total(), sum(store.num_tokens for store in stores)
    if view.num_tokens <= seq_len:
        num_documents = counts["held_out" if holdout.held_out else "to_train_on"]
        raise holdout.too_small(
            needed=f"seq_len + 1 = {seq_len + 1} tokens of {name:.200}",
            found=f"{view.num_tokens} in {num_documents} of {total} documents",
        )
    if not holdout.held_out:
        holdout.log(
            name,
            num_held_out=counts["held_out"],
            counted=plural(total, "document"),
            num_left=counts["to_train_on"],
            more=f" with {view.num_tokens} of {num_tokens} tokens",
        )
    return view


def _cached_table(
    store: TokenStore, fraction: float, *, end: int, cache: str
) -> tuple[TokenStore, dict[str, Any]]:
    held_out = Holdout(fraction, held_out=True)
    files = [file_identity(Path(store.prefix + suffix)) for suffix in (".idx", ".bin")]
    return cached(
        [FORMAT, fraction, end, files],
        cache=cache,
        vocab_size=store.num_tokens + 1,
        write=lambda writer: _divide(store, held_out, end=end, writer=writer),
    )


def _divide(
    store: TokenStore, held_out: Holdout, *, end: int, writer: StoreWriter
) -> dict[str, object]:
    """Write the runs of the documents to train on, then the runs of the held-out documents.

    Each side has two rows: the start of each run in the view, then the length of the view; and the
    start of each run in the store.
    """
    logger.info("dividing %s of %s", plural(store.num_documents, "document"), store.prefix)
    firsts, places = (array("q"), array("q")), (array("q"), array("q"))
    num_tokens, num_documents = [0, 0], [0, 0]
    at, last = 0, None
    for number in range(store.num_documents):
        document = store.document(number)
        side = held_out.selects(document, end=end)
        if side != last:
            firsts[side].append(num_tokens[side])
            places[side].append(at)
        num_tokens[side] += len(document)
        num_documents[side] += 1
        at, last = at + len(document), side
    assert at == store.num_tokens, "an open store's documents cover its tokens"
    for side in (False, True):
        firsts[side].append(num_tokens[side])
        writer.add(np.array(firsts[side]), ends_document=True)
        writer.add(np.array(places[side], np.int64), ends_document=True)
    return {"to_train_on": num_documents[False], "held_out": num_documents[True]}
