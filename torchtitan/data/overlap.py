"""Tell whether data to validate on are among those of the training, by a look at some of them.

A loss on documents that were trained on says nothing of others, and nobody notices: it is merely
good. Files that both read are found by what they are on disk, under any name. Copies are found by
content: as many as `NUM_DOCUMENTS` documents of each side are compared, spread evenly over all, by
their lengths and their first and last tokens. So the work is bounded whatever the size of the data,
and data of no more documents are compared whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.data.files import find_files
from torchtitan.data.split import content_number
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import Tokenizer

NUM_DOCUMENTS = 1 << 14
NUM_TOKENS = 128
NUM_NAMED, NUM_CHARACTERS = 2, 40


class Documents:
    """The documents of some stores, numbered from 0 through all of them.

    `end`: the token that may close a document, stores differ in that; it is left out.
    """

    def __init__(self, stores: Sequence[TokenStore], *, end: int) -> None:
        self._stores, self._end = stores, end
        self._ends = list(accumulate(store.num_documents for store in stores))

    def __getitem__(self, number: int) -> npt.NDArray[Any]:
        store = bisect_right(self._ends, number)
        first = self._ends[store - 1] if store else 0
        tokens = self._stores[store].document(number - first)
        return tokens[:-1] if len(tokens) and tokens[-1] == self._end else tokens

    def keys(self) -> dict[int, tuple[int, int]]:
        """Return the numbers of the documents to look at, and for each what tells it from others.

        Those without tokens are left out.
        """
        total = self._ends[-1]
        count = min(total, NUM_DOCUMENTS)
        keys = {}
        for number in (i * total // count for i in range(count)):
            tokens = self[number]
            if len(tokens):
                both_ends = np.concatenate([tokens[:NUM_TOKENS], tokens[-NUM_TOKENS:]])
                keys[number] = (len(tokens), content_number(both_ends))
        return keys

    def looked_at(self) -> str:
        """Say how many documents are looked at, of how many."""
        total = self._ends[-1]
        if total <= NUM_DOCUMENTS:
            return f"{total} documents"
        return f"{NUM_DOCUMENTS} documents (looked at, of {total})"


def shared_files(ours: Iterable[str], theirs: Iterable[str]) -> list[Path]:
    """Return the files of the entries `ours` of a dataset_path that `theirs` name too."""

    def by_place(entries: Iterable[str]) -> dict[tuple[int, int], Path]:
        # a link is another name of the same file
        files = [(file, file.stat()) for entry in entries for file in find_files(entry)]
        return {(status.st_dev, status.st_ino): file for file, status in files}

    known = by_place(theirs)
    return [file for place, file in by_place(ours).items() if place in known]


def describe_shared_documents(
    ours: Sequence[TokenStore], theirs: Sequence[TokenStore], *, tokenizer: Tokenizer, shift: int
) -> str | None:
    """Say how many documents of `ours` are in `theirs` too, and how two of them begin; None: none.

    `shift`: the bits of a stored number below the token's id: 1 for examples, 0 for text.
    """
    end = (tokenizer.eos_id << shift) | shift
    held, trained = Documents(ours, end=end), Documents(theirs, end=end)
    known = set(trained.keys().values())
    shared = [number for number, key in held.keys().items() if key in known]
    if not shared:
        return None
    named = []
    for number in shared[:NUM_NAMED]:
        ids = held[number][:NUM_CHARACTERS] >> shift
        beginning = tokenizer.decode(ids.tolist())[:NUM_CHARACTERS]
        named.append(f"document {number + 1} ({beginning!r})")
    return (
        f"{len(shared)} of {held.looked_at()} that are among the {trained.looked_at()} trained "
        f"on, as {' and '.join(named)}"
    )
