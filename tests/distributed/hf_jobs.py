"""What ranks do in the tests of Hugging Face's weights; apart, since they need no transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed import jobs
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.state import model_tensors
from torchtitan.hf import weights as hf_weights
from torchtitan.hf.export import HFExport, export
from torchtitan.hf.names import Names
from torchtitan.models import llama3

original_open = hf_weights.safe_open


class Counted:
    """A file whose slices are counted."""

    num_bytes = 0

    def __init__(self, file: Path, **options: Any) -> None:
        self._file = original_open(file, **options)

    def __enter__(self) -> Counted:
        self._opened = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> Counted:
        self._slice = self._opened.get_slice(name)
        return self

    def __getitem__(self, where: Any) -> Tensor:
        piece: Tensor = self._slice[where]
        Counted.num_bytes += piece.nbytes
        return piece


def begin(job: list[str]) -> tuple[dict[str, Tensor], int, int]:
    """Begin a job; return its weights, and the bytes that this rank has read and holds."""
    Counted.num_bytes = 0
    hf_weights.safe_open = Counted
    try:
        run = jobs.start(job)
    finally:
        hf_weights.safe_open = original_open
    own = model_tensors(run.model)
    local = [t.to_local() if isinstance(t, DTensor) else t for t in own.values()]
    weights = {name: jobs.full(t) for name, t in own.items()}
    return weights, Counted.num_bytes, sum(t.nbytes for t in local)


def start_again(job: list[str]) -> int:
    """Start a finished job; return its step."""
    run = jobs.start(job)
    assert run.checkpoints is not None
    run.checkpoints.export_missing()
    run.checkpoints.close()
    return run.progress.step


def export_together(step: Path, target: Path) -> None:
    names = Names(llama3.HF, llama3.FLAVORS["tiny"])
    settings = HFExport(names=names, max_file_bytes=20_000)
    export(step, target, settings=settings, group=dist.group.WORLD)


def refused_export(step: Path, target: Path) -> str:
    try:
        export_together(step, target)
    except CheckpointError as error:
        return str(error)
    return "no error"
