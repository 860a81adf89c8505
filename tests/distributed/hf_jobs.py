"""What ranks do in the tests of Hugging Face's weights; apart, since they need no transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed import jobs
from torchtitan.api import load_generator
from torchtitan.base.errors import ConfigError
from torchtitan.checkpoint.state import model_tensors
from torchtitan.generate.sampling import generate
from torchtitan.hf import weights as hf_weights
from torchtitan.hf.export import HFExport, export
from torchtitan.hf.names import Names
from torchtitan.models import llama3
from torchtitan.models.init import local_part
from torchtitan.trainer import Trainer

PROMPTS = [[5, 200, 17, 17, 3], [7], list(range(1, 31))]
LENGTH = 16
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


def export_together(step: Path, target: Path) -> None:
    names = Names(llama3.HF, llama3.FLAVORS["tiny"])
    settings = HFExport(names=names, max_file_bytes=20_000)
    export(step, target, settings=settings, group=dist.group.WORLD)


def weights_and_step(job: list[str]) -> tuple[dict[str, Tensor], int]:
    """Begin a job; return its weights and its step."""
    run = jobs.start(job)
    return {n: jobs.full(t) for n, t in model_tensors(run.model).items()}, run.progress.step


def write_sharded(folder: Path, state: dict[str, Tensor], dim: int) -> None:
    """As FSDP saves: here each piece of a norm is half a head, and one of wk may be too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = {
        name: distribute_tensor(t, mesh, [Shard(dim if t.ndim > 1 else 0)])
        for name, t in state.items()
    }
    dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder))


def write_part(folder: Path, state: dict[str, Tensor]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in state.items()}
    if dist.get_rank() == 0:
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def train(job: list[str]) -> str:
    """Train; return the hash of the state."""
    run = jobs.start(job)
    trainer = Trainer(run)
    trainer.train()
    trainer.close()
    return jobs.hash_state(run)


def texts(folder: Path) -> tuple[list[list[int]], int] | str:
    """Return this rank's texts and the keys and values that it holds, or why there are none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    try:
        generator = load_generator(folder, device=torch.device("cpu"), mesh=mesh, tokenizer="byte")
    except ConfigError as error:
        return str(error)
    held = sum(local_part(p).numel() for p in generator.model.parameters())
    return generate(generator.model, PROMPTS, max_new_tokens=LENGTH, temperature=0), held
