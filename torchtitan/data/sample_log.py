"""The hash of each sample trained on, to prove that none was skipped or repeated.

Of the ranks that read the same samples one logs them, to a file of its own: the sample's number in
the global order, the step, and a hash of the tokens that go into the model, so that a wrong number
shows too. The files of all ranks and starts, sorted by number, list what the run has seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from torchtitan.base.errors import DataError


def hash_tokens(tokens: torch.Tensor) -> str:
    """Return 16 hexadecimal digits of a hash of a sample's tokens."""
    return hashlib.sha256(tokens.to(torch.int64).numpy().tobytes()).hexdigest()[:16]


class SampleLog:
    """Appends to `folder / rank_N.jsonl` if this rank `writes`; `step` returns the current step.

    First, all ranks drop what an earlier start, of any number of ranks, logged for this step or
    later ones.
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
                f"cannot write {path}: {error.strerror}; make room and start again, or leave out "
                f"debug.log_sample_hashes"
            ) from error

    def _drop_from(self, step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("rank_*.jsonl"):
            # a rank's own file, and a share of those from ranks that no longer exist
            if int(path.stem.removeprefix("rank_")) % self._world_size != self._rank:
                continue
            rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # a cut last line is of a step after the checkpoint
            whole = [row for row in rows if row.endswith("\n")]
            kept = [row for row in whole if json.loads(row)["step"] < step]
            path.write_text("".join(kept), encoding="utf-8")
