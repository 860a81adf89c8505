"""Saving and loading checkpoints.

One process saves and loads the same tensors in two ways:

    save      the library's checkpoint (checksums, fsync, rename)  against  torch.save with fsync
    load      the library's, all checksums verified first          against  torch.load
    blocked   the time an asynchronous save blocks the loop        against  a synchronous one

Loads find their files in the page cache. The library fills existing tensors, torch.load allocates.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scripts.benchmarks.pairs import (
    ELAPSED,
    Comparison,
    Report,
    Spent,
    alternate,
    timed,
)
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import verify
from torchtitan.checkpoint.manager import CheckpointIO, CheckpointManager, build_group
from torchtitan.checkpoint.reader import read_tensors
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.state import Component, Progress, RunState
from torchtitan.checkpoint.storage import find_steps
from torchtitan.data.loader import Loader

TARGET = "at most 1.10"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--size_gib", type=float, default=1.0, metavar="N", help="of the state")
    parser.add_argument("--tensors", type=int, default=16, metavar="N", help="number of tensors")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="on the disk to measure")


def measure(args: argparse.Namespace) -> Report:
    """Run all comparisons; files are deleted afterwards."""
    about = {"size_gib": args.size_gib, "torch": torch.__version__}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            numel = max(1, int(args.size_gib * 2**30 / 4 / args.tensors))
            tensors = {f"layers.{i}.weight": torch.randn(numel) for i in range(args.tensors)}
            comparisons = _compare_blocked(Path(folder), tensors, num_pairs=args.pairs)
            comparisons = _compare_files(Path(folder), tensors, num_pairs=args.pairs) + comparisons
        finally:
            dist.destroy_process_group()
    return Report(about=about | {"tensors": args.tensors}, comparisons=comparisons)


def _compare_files(folder: Path, tensors: dict[str, Tensor], *, num_pairs: int) -> list[Comparison]:
    group = dist.group.WORLD
    assert group is not None
    step, plain = folder / "step-1", folder / "plain.pt"
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def spent(action: Callable[[], object]) -> Spent:
        # a virtual machine may have returned free memory to its host: claim it before the clock
        torch.ones(num_bytes, dtype=torch.uint8)
        return timed(action)

    def save() -> Spent:
        shutil.rmtree(step, ignore_errors=True)
        component = Component(tensors=tensors)
        return spent(lambda: storage.write(step, {"model": component}, manifest={}, group=group))

    def save_plain() -> Spent:
        plain.unlink(missing_ok=True)
        return spent(lambda: _torch_save(tensors, plain))

    def load() -> Spent:
        return spent(lambda: _verify_and_load(step, into, group))

    def load_plain() -> Spent:
        return spent(lambda: torch.load(plain, weights_only=True))

    saves = alternate("save / torch.save", TARGET, save, save_plain, num_pairs=num_pairs)
    loads = alternate("load / torch.load", TARGET, load, load_plain, num_pairs=num_pairs)
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)
    return saves + loads


def _torch_save(tensors: dict[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _verify_and_load(step: Path, into: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    mistakes = verify(step, group=group)
    assert not mistakes, mistakes
    read_tensors(step, "model", into=into, group=group)


class _NoData:
    def state_dict(self) -> dict[str, int]:
        return {"position": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("this benchmark loads no data position")


def _compare_blocked(
    folder: Path, tensors: dict[str, Tensor], *, num_pairs: int
) -> list[Comparison]:
    modes: tuple[Literal["async"], Literal["disabled"]] = ("async", "disabled")
    saves = [_build_save(folder / mode, tensors, mode) for mode in modes]
    return alternate(
        "blocked by async / sync", "at most 0.10", *saves, num_pairs=num_pairs, clocks=[ELAPSED]
    )


def _build_save(
    folder: Path, tensors: dict[str, Tensor], mode: Literal["disabled", "async"]
) -> Callable[[], Spent]:
    """Return a function that measures how long a save blocks the loop, then waits for the save."""
    half = list(tensors.values())[::2]  # the optimizer's momentum is the other half of the state
    model = nn.ParameterList(nn.Parameter(tensor) for tensor in half)
    progress = Progress()
    state = RunState(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9),
        lr_settings={},
        loader=cast(Loader, _NoData()),
        progress=progress,
    )
    settings = CheckpointConfig(enable=True, interval=1, keep_latest_k=1, async_mode=mode)
    io = CheckpointIO(build_group(3600), folder)
    manager = CheckpointManager(state, settings=settings, io=io, manifest={})

    def save() -> Spent:
        progress.step += 1
        spent = timed(lambda: manager.save(last=False))
        while find_steps(folder) != [progress.step]:  # until the previous one is deleted too
            time.sleep(0.05)
        return spent

    return save
