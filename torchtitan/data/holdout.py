"""Documents held out of training by a hash of their content: `validation.holdout_fraction`.

A split by position (the last files, every hundredth document) changes when data are added, and puts
copies of a document on both sides. Here a document is held out if the hash of its tokens is below a
threshold. So it stays on its side when other data change, its copies are on the same side, and a
larger fraction holds out the same documents and more. The hash does not depend on the seed.

Text is written to two stores when it is tokenized (`prepare.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy.typing as npt

from torchtitan.base.errors import DataError

# part of the hash, so that other uses of it select other documents
PERSON = b"validation split"
HELD_OUT = ".holdout-"
"""Part of the names of stores that hold held-out documents."""


def goes_to_holdout(ids: npt.NDArray[Any], fraction: float) -> bool:
    """Return whether a document with these ids, without its end token, is held out."""
    digest = blake2b(ids.astype("<i4").tobytes(), digest_size=8, person=PERSON).digest()
    return int.from_bytes(digest, "little") < int(fraction * 2**64)


def held_out_prefix(prefix: str, fraction: float) -> str:
    """Return the prefix of the store that holds the documents held out of the store `prefix`."""
    return f"{prefix}{HELD_OUT}{fraction}"


@dataclass(frozen=True)
class Holdout:
    """The documents to read: all, those that a fraction holds out, or those to train on.

    Without a fraction, `held_out` selects other text of generated data.
    """

    fraction: float | None = None
    held_out: bool = False

    @property
    def takes_other_text(self) -> bool:
        """Return whether generated data are others than to train on."""
        return self.held_out and self.fraction is None

    def selects(self, ids: npt.NDArray[Any]) -> bool:
        """Return whether a document is on this side."""
        return self.fraction is None or goes_to_holdout(ids, self.fraction) == self.held_out

    def fingerprint(self) -> dict[str, str]:
        """Return what selects the samples of this side."""
        if self.fraction is None:
            return {}
        return {"validation.split": f"{self.fraction}{', held out' if self.held_out else ''}"}

    def too_small(self, got: str) -> DataError:
        """Return the error for data with less than a sample on this side."""
        side = "held out" if self.held_out else "left to train on"
        rule = (
            f"{self.fraction} leaves too little data {side}: {got}; change it, add documents, or "
            f"name other files in validation.dataset_path"
        )
        return DataError.at("holdout_fraction", rule)


ALL = Holdout()
