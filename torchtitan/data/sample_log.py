"""The hash of each sample trained on, to prove that no sample was skipped or repeated.

One of the ranks that read the same samples logs them to its own file: the sample's number in the
global order, the step, and a hash of the tokens that enter the model, which also exposes a wrong
number. The files of all ranks and starts, sorted by number, list the samples of the run.
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
    """Appends samples to `folder / rank_N.jsonl`.

    At the first sample, all ranks remove the rows that an earlier start, with any number of ranks,
    logged for this step or later.

    Args:
        folder: Folder of the files.
        rank: Rank of this process.
        world_size: Number of ranks.
        writes: Whether this rank logs its samples.
        step: Returns the current step.
    """

    def __init__(
        self, folder: Path, *, rank: int, world_size: int, writes: bool, step: Callable[[], int]
    ) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._writes, self._step = writes, step
        self._is_open = False

    def __call__(self, number: int, tokens: torch.Tensor) -> None:
        """Append one sample."""
        step = self._step()
        if not self._is_open:
            self._remove_from(step)
            self._is_open = True
        if not self._writes:
            return
        row = {"step": step, "index": number, "hash": hash_tokens(tokens)}
        path = self._folder / f"rank_{self._rank}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise DataError(
                f"cannot write {path}: {error.strerror}; free space, or switch off "
                f"debug.log_sample_hashes"
            ) from error

    def _remove_from(self, step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("rank_*.jsonl"):
            # this rank's file, and a share of the files from ranks that no longer exist
            if int(path.stem.removeprefix("rank_")) % self._world_size != self._rank:
                continue
            rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # a cut last line belongs to a step after the checkpoint
            whole = [row for row in rows if row.endswith("\n")]
            kept = [row for row in whole if json.loads(row)["step"] < step]
            path.write_text("".join(kept), encoding="utf-8")
