"""What checkpoints cost.

One process saves and loads the same tensors in two ways:

    save     the library's checkpoint (checksums, fsync, rename)  against  torch.save with fsync
    load     the library's (all checksums verified first)         against  torch.load
    blocked  how long the loop waits for an asynchronous save     against  for a synchronous one

Loads find their files in the page cache; ours fill tensors that are there, as those of a model are,
torch.load makes new ones. All files are removed again.
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
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scripts.benchmarks.pairs import (
    Comparison,
    Report,
    Spent,
    alternate,
    alternate_by_clocks,
    read_clocks,
    spent_since,
    timed,
)
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import verify
from torchtitan.checkpoint.load import read_tensors
from torchtitan.checkpoint.manager import CheckpointIO, CheckpointManager, build_group
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.state import Component, Progress, RunState
from torchtitan.checkpoint.storage import find_steps

SUMMARY = "save, load, and time the loop is blocked"
TARGET = "at most 1.10"
MODES: tuple[Literal["async"], Literal["disabled"]] = ("async", "disabled")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--size_gib", type=float, default=1.0, metavar="N", help="of the state")
    parser.add_argument("--tensors", type=int, default=16, metavar="N", help="it consists of")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="on the disk to measure")


def measure(args: argparse.Namespace) -> Report:
    """Run all comparisons, each after one pair that is not counted."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            numel = max(1, int(args.size_gib * 2**30 / 4 / args.tensors))
            tensors = {f"layers.{i}.weight": torch.randn(numel) for i in range(args.tensors)}
            comparisons = _compare(Path(folder), tensors, num_pairs=args.pairs)
    finally:
        dist.destroy_process_group()
    about = {"size_gib": args.size_gib, "tensors": args.tensors, "torch": torch.__version__}
    return Report(about=about, comparisons=comparisons)


def _compare(folder: Path, tensors: dict[str, Tensor], *, num_pairs: int) -> list[Comparison]:
    blocked = [_measure_blocked(folder / mode, tensors, mode) for mode in MODES]
    return [
        *_save_and_load(folder, tensors, num_pairs=num_pairs),
        alternate("blocked by async / sync", "at most 0.10", *blocked, num_pairs=num_pairs),
    ]


def _save_and_load(folder: Path, tensors: dict[str, Tensor], *, num_pairs: int) -> list[Comparison]:
    group = dist.group.WORLD
    assert group is not None
    step, plain = folder / "step-1", folder / "plain.pt"
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def spent(action: Callable[[], object]) -> Spent:
        # a virtual machine may have given free memory back to its host, and waits for it anew
        torch.ones(num_bytes, dtype=torch.uint8)
        start = read_clocks()
        action()
        return spent_since(start)

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

    saves = alternate_by_clocks("save / torch.save", TARGET, save, save_plain, num_pairs=num_pairs)
    loads = alternate_by_clocks("load / torch.load", TARGET, load, load_plain, num_pairs=num_pairs)
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)
    shutil.rmtree(step)
    plain.unlink()
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
        raise AssertionError("nothing is loaded here")


def _measure_blocked(
    folder: Path, tensors: dict[str, Tensor], mode: Literal["disabled", "async"]
) -> Callable[[], float]:
    """Return what measures how long `save_if_due` holds up a loop, then waits for the save."""
    half = list(tensors.values())[::2]  # the optimizer's momentum is the other half of the state
    model = nn.ParameterList(nn.Parameter(tensor) for tensor in half)
    progress = Progress()
    state = RunState(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9),
        lr_settings={},
        loader=_NoData(),
        progress=progress,
    )
    settings = CheckpointConfig(enable=True, interval=1, keep_latest_k=1, async_mode=mode)

    manager = CheckpointManager(
        state,
        settings=settings,
        io=CheckpointIO(build_group(3600), folder),
        manifest={},
    )

    def run() -> float:
        progress.step += 1
        seconds = timed(lambda: manager.save(last=False))
        while find_steps(folder) != [progress.step]:  # also the one before is gone
            time.sleep(0.05)
        return seconds

    return run
