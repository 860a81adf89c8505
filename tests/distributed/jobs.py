"""Whole training jobs for the ranks of the pool, and what tests want to know of them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from scripts.ports import hold_port
from tests.jobs import TINY
from torchtitan import build as assembling
from torchtitan.base.errors import UserError
from torchtitan.build import build_run
from torchtitan.checkpoint.state import model_tensors, optimizer_tensors
from torchtitan.job import load_config
from torchtitan.mesh.ranks import RankInfo
from torchtitan.models.interface import HeadLoss
from torchtitan.trainer import Run, Trainer

T = TypeVar("T")
_PLACES: list[socket.socket] = []  # held as long as this process


@dataclass(frozen=True)
class Result:
    """What a job leaves, seen from one rank."""

    rows: list[dict[str, Any]]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    state_hash: str


def write_job(
    folder: Path, toml: str = TINY, *, name: str = "run", cache: Path | None = None
) -> list[str]:
    """Write a job's TOML and return the arguments that run it into `folder / name`."""
    path = folder / f"{name}.toml"
    draft = path.with_suffix(f".{os.getpid()}")  # ranks may write it while others read it
    draft.write_text(toml)
    draft.replace(path)
    return [
        f"--job.config_file={path}",
        f"--job.dump_folder={folder / name}",
        f"--training.dataset_cache={cache or folder / 'cache'}",
    ]


def places_of_ranks(world: int) -> list[dict[str, str]]:
    """Return the variables by which ranks are started without a launcher, rank by rank."""
    _PLACES.append(hold_port())
    port = _PLACES[-1].getsockname()[1]
    meeting_point = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **meeting_point}
        for rank in range(world)
    ]


def full(tensor: Tensor) -> Tensor:
    """Gather a tensor from its shards."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@contextmanager
def other_loss(change: Callable[[HeadLoss], HeadLoss]) -> Iterator[None]:
    """Let runs that are assembled inside compute another loss, made from the right one."""
    correct = assembling.build_loss
    assembling.build_loss = lambda *args, **settings: change(correct(*args, **settings))
    try:
        yield
    finally:
        assembling.build_loss = correct


def start(arguments: list[str]) -> Run:
    """Assemble a job on this rank."""
    launch = RankInfo(
        rank=dist.get_rank(), local_rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    return build_run(load_config(arguments), launch=launch, color=False, cleanup=ExitStack())


def train(arguments: list[str]) -> Result:
    """Run a job to its end on this rank."""
    run = start(arguments)
    initial = {name: full(p) for name, p in run.model.named_parameters()}
    trainer = Trainer(run)
    trainer.train()
    close(trainer)
    return Result(
        rows=read_rows(load_config(arguments).job.dump_folder),
        initial=initial,
        final={name: full(p) for name, p in run.model.named_parameters()},
        state_hash=hash_state(run),
    )


def after_each_step(arguments: list[str], look: Callable[[Run], T]) -> list[T]:
    """Run a job to its end on this rank; return what `look` returns after each step."""
    run, found = start(arguments), list[T]()
    trainer = Trainer(run)
    trainer.train(on_step=lambda step: found.append(look(run)))
    close(trainer)
    return found


def close(trainer: Trainer) -> None:
    """Close a trainer, and wait until rank 0 has written its last row."""
    trainer.close()
    dist.barrier()


@contextmanager
def listening(level: int = logging.INFO) -> Iterator[list[str]]:
    """Collect what is logged inside at `level` or above."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchtitan")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def logged(job: list[str], level: int = logging.INFO) -> list[str]:
    """Begin a job, and return what it logged."""
    with listening(level) as lines:
        start(job)
    return lines


def refusal(job: list[str]) -> str:
    """Begin a job; return what it is refused for."""
    return _error_of(start, job)


def failure(job: list[str]) -> str:
    """Run a job; return what it fails with."""
    return _error_of(train, job)


def _error_of(action: Callable[[list[str]], object], job: list[str]) -> str:
    try:
        action(job)
    except UserError as error:
        return str(error)
    return "no error"


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def samples(folder: Path) -> list[tuple[int, int, str]]:
    """Return (number, step, hash) of every sample that any rank drew, in order."""
    lines = [
        json.loads(line)
        for path in (folder / "samples").glob("rank_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted((row["index"], row["step"], row["hash"]) for row in lines)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Hash names and elements, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_state(run: Run) -> str:
    """Hash parameters, optimizer state, random generator and data position, bit for bit."""
    tensors = model_tensors(run.model) | optimizer_tensors(run.model, run.optimizer)
    whole = {name: full(tensor) for name, tensor in sorted(tensors.items())}
    digest = hashlib.sha256(hash_tensors(whole).encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    digest.update(json.dumps(run.loader.state_dict(), sort_keys=True).encode())
    digest.update(json.dumps([run.progress.step, run.progress.tokens_seen]).encode())
    return digest.hexdigest()
