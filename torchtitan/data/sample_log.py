"""The hash of every sample that was trained on, for proof that none was skipped or repeated.

Of the ranks that draw the same samples one writes them, in its own file: their number in the global
order, the step, and a hash of the tokens as they go into the model, so that a wrong number shows
too. The files of all ranks and starts together, sorted by number, tell what the run has seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from torchtitan.base.errors import DataError


def hash_tokens(tokens: torch.Tensor) -> str:
    """Return 16 hexadecimal digits that tell a sample's tokens from others."""
    return hashlib.sha256(tokens.to(torch.int64).numpy().tobytes()).hexdigest()[:16]


class SampleLog:
    """Append to `folder / rank_N.jsonl`, if this rank `writes`; `step` tells the step being drawn.

    What an earlier start, of any number of ranks, drew in this step or later is dropped first, by
    all ranks.
    """

    def __init__(
        self, folder: Path, *, rank: int, world_size: int, writes: bool, step: Callable[[], int]
    ) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._writes, self._step = writes, step
        self._begun = False

    def __call__(self, number: int, tokens: torch.Tensor) -> None:
        """Append one sample."""
        step = self._step()
        if not self._begun:
            self._drop_from(step)
            self._begun = True
        if not self._writes:
            return
        row = {"step": step, "index": number, "hash": hash_tokens(tokens)}
        path = self._folder / f"rank_{self._rank}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise DataError(
                f"{path} must be writable all along, got: {error.strerror}; make room and start "
                f"again, or leave out debug.log_sample_hashes"
            ) from error

    def _drop_from(self, step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("rank_*.jsonl"):
            # a rank's own file, and those of ranks that are no more: no two ranks touch the same
            if int(path.stem.removeprefix("rank_")) % self._world_size != self._rank:
                continue
            rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # a line without its end was cut off, in a step after the checkpoint
            whole = [row for row in rows if row.endswith("\n")]
            kept = [row for row in whole if json.loads(row)["step"] < step]
            path.write_text("".join(kept), encoding="utf-8")
