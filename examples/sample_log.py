"""A callback that logs the hash of each sample, to prove that none was skipped or repeated.

    ./run_train.sh --training.callbacks examples.sample_log:SampleLog

One of the ranks that read the same samples writes them to `samples/rank_N.jsonl` in the run's
folder: the step, the sample's number in the global order, and a hash of its tokens, which also
exposes a wrong number. The files of all ranks and starts, sorted by number, list the samples of the
run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def hash_tokens(tokens: torch.Tensor) -> str:
    """Return 16 hexadecimal digits of a hash of a sample's tokens."""
    return hashlib.sha256(tokens.to(torch.int64).numpy().tobytes()).hexdigest()[:16]


class SampleLog:
    """Appends samples to a file of each rank."""

    def on_start(self, run: Any) -> None:
        """Remove the rows that an earlier start logged for later steps, and log from now on."""
        folder, rank = run.folder / "samples", dist.get_rank()
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("rank_*.jsonl"):
            # this rank's file, and a share of the files of ranks that no longer exist
            if int(file.stem.removeprefix("rank_")) % dist.get_world_size() == rank:
                remove_rows(file, after=run.progress.step)
        # the first of the ranks that read the same samples
        if all(run.mesh.data.get_local_rank(axis) == 0 for axis in ("pp", "cp", "tp")):
            file = folder / f"rank_{rank}.jsonl"
            # samples are drawn for the next step
            run.loader.on_sample = lambda number, tokens: append(
                file, step=run.progress.step + 1, number=number, tokens=tokens
            )


def append(file: Path, *, step: int, number: int, tokens: torch.Tensor) -> None:
    """Append a sample to a file."""
    row = {"step": step, "index": number, "hash": hash_tokens(tokens)}
    with file.open("a", encoding="utf-8") as log:
        log.write(json.dumps(row) + "\n")


def remove_rows(file: Path, *, after: int) -> None:
    """Remove the rows of steps after `after` from a file."""
    rows = file.read_text(encoding="utf-8").splitlines(keepends=True)
    # a cut last line belongs to a step after the checkpoint
    complete = [row for row in rows if row.endswith("\n")]
    kept = [row for row in complete if json.loads(row)["step"] <= after]
    file.write_text("".join(kept), encoding="utf-8")
