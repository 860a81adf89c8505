"""Where documents begin and end in the sequences of a batch: by their lengths, never by a mask.

An S x S mask makes long sequences run out of memory. Lengths say the same with one number per
document, and kernels need them anyway: for a loop over slices, or as running sums for
variable-length kernels. They stay on the host, so that planning with them never waits for a device.

Shapes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Documents:
    """The documents of B sequences of equal length, one after another in each.

    A plain class on purpose: FSDP walks through the tuples and dataclasses among a block's
    arguments, number by number.
    """

    def __init__(self, lengths: tuple[tuple[int, ...], ...]) -> None:
        """Take the tokens of each document, a row for each sequence, all rows of the same sum."""
        self.lengths = lengths
        self._worked_out: dict[Hashable, Any] = {}

    def remember(self, what: Hashable, work_out: Callable[[], T]) -> T:
        """Return what `work_out` computes from the documents; every layer asks for it, forward and
        backward, and it is computed once."""
        if what not in self._worked_out:
            self._worked_out[what] = work_out()
        found: T = self._worked_out[what]
        return found

    @classmethod
    def from_flat(cls, lengths: torch.Tensor, *, seq_len: int) -> Documents:
        """Take the lengths of all sequences in a row, int64: each S tokens make a sequence."""
        rows: list[list[int]] = []
        left = 0
        for length in lengths.tolist():
            assert length > 0, "a document has at least one token"
            if not left:
                rows.append([])
                left = seq_len
            rows[-1].append(length)
            left -= length
            assert left >= 0, "a document ends with its sequence"
        assert not left, "a document ends with its sequence"
        return cls(tuple(map(tuple, rows)))

    def __getitem__(self, rows: slice) -> Documents:
        """Return the documents of some of the sequences."""
        return Documents(self.lengths[rows])

    def bounds(self, row: int) -> Iterator[tuple[int, int]]:
        """Yield where each document of a sequence begins and ends."""
        return pairwise(accumulate(self.lengths[row], initial=0))

    def positions(self) -> torch.Tensor:
        """Return each token's place in its document, int64 (B, S)."""
        return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in self.lengths])
