"""Average the weights of a run's checkpoints.

    python -m torchtitan average outputs/run --out DIR

An average over the last part of a run is often better than its last step, as if the learning rate
had decayed further. Trainers keep such an average (EMA) in memory, with a decay chosen before the
run. Here it is made afterwards from checkpoints w_1 ... w_k, in the order of their steps:

    uniform   m = (w_1 + ... + w_k) / k             (stochastic weight averaging, arXiv 1803.05407)
    ema       m_1 = w_1,  m_i = d m_{i-1} + (1 - d) w_i           (Polyak averaging; d is --decay)

The EMA starts at w_1, so no bias needs a correction. The decay is per checkpoint, whatever the
number of steps between two: for a decay c per training step, saved every n steps, give d = c^n.

Sums are in float64, and each element is rounded once, to the type it is stored in. A few million
elements are read from every checkpoint, averaged and written before the next ones are read: memory
depends neither on the size of the model nor on the number of checkpoints. The result is a step with
weights alone, under the settings of the last checkpoint, or a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import CheckpointError, UserError
from torchtitan.base.log import plural
from torchtitan.base.urls import local_path
from torchtitan.build import describe_export
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import HashingFileSystem, summarize, verify
from torchtitan.checkpoint.reader import TensorReader, is_tensor
from torchtitan.checkpoint.rows import overlap
from torchtitan.checkpoint.state import MODEL_STATE, Component
from torchtitan.checkpoint.storage import draft_of, list_steps, step_of
from torchtitan.hf.export import export
from torchtitan.mesh.ranks import reasons
from torchtitan.models.families import find_model
from torchtitan.resume_rules import find_run_step, read_settings

logger = logging.getLogger(__name__)
Kind = Literal["uniform", "ema"]
BLOCK = 1 << 22
"""Elements that are averaged at a time; one row of a tensor at least."""
_KEPT = ("step", "layout", "config", "code")
"""What the result's manifest takes over from that of the last checkpoint."""


def coefficients(num: int, *, kind: Kind, decay: float) -> list[float]:
    """Return how much of each checkpoint is in the average, before `divisor` divides the sum."""
    if kind == "uniform":
        return [1.0] * num
    return [decay ** (num - 1), *((1 - decay) * decay ** (num - i) for i in range(2, num + 1))]


class Averaging(DefaultSavePlanner):
    """Lets DCP write the average block by block: each is computed when it is written."""

    def __init__(self, readers: Sequence[TensorReader], *, factors: Sequence[float], divisor: int):
        super().__init__(flatten_state_dict=False)
        self._readers = readers
        self._factors, self._divisor = factors, divisor
        self._num_items = self._num_done = 0

    def create_local_plan(self) -> SavePlan:
        """Return a piece to write for each block of rows of each tensor."""
        items = []
        for name, entry in self._readers[0].entries.items():
            properties = TensorProperties(dtype=entry.properties.dtype)
            for chunk in _blocks(entry.size):
                index = MetadataIndex(name, chunk.offsets)
                about = TensorWriteData(chunk=chunk, properties=properties, size=entry.size)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=about))
        self._num_items = len(items)
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the average of a block."""
        assert write_item.tensor_data is not None
        block = self._average(write_item.index.fqn, write_item.tensor_data.chunk)
        before, self._num_done = self._num_done, self._num_done + 1
        if 10 * before // self._num_items < 10 * self._num_done // self._num_items:
            logger.info("averaged %d of %d blocks", self._num_done, self._num_items)
        return block

    def _average(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        dtype: torch.dtype = self._readers[0].entries[name].properties.dtype
        part = torch.empty(chunk.sizes, dtype=dtype)
        if not dtype.is_floating_point:
            return self._equal(name, chunk, part)
        total = torch.zeros(chunk.sizes, dtype=torch.float64)
        for reader, factor in zip(self._readers, self._factors, strict=True):
            _read(reader, name, chunk, into=part)
            total.add_(part, alpha=factor)
        return total.div_(self._divisor).to(dtype)

    def _equal(self, name: str, chunk: ChunkStorageMetadata, part: Tensor) -> Tensor:
        first = torch.empty_like(part)
        _read(self._readers[0], name, chunk, into=first)
        for reader in self._readers[1:]:
            _read(reader, name, chunk, into=part)
            if not torch.equal(part, first):
                raise CheckpointError(
                    f"'{name}' is of type {part.dtype}, which has no average, and must be equal in "
                    f"all checkpoints; it differs between {self._readers[0].path} and "
                    f"{reader.path}: name steps in which it is the same"
                )
        return first


def _blocks(size: torch.Size) -> Iterator[ChunkStorageMetadata]:
    """Yield the blocks of rows of a tensor of this shape."""
    if not size or not size.numel():
        yield ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return
    num_rows = max(1, BLOCK // (size.numel() // size[0]))
    for row in range(0, size[0], num_rows):
        count = min(num_rows, size[0] - row)
        offsets = torch.Size([row, *[0] * (len(size) - 1)])
        yield ChunkStorageMetadata(offsets, torch.Size([count, *size[1:]]))


def _read(reader: TensorReader, name: str, block: ChunkStorageMetadata, *, into: Tensor) -> None:
    """Fill `into` with a block of a stored tensor, from the pieces that it lies in."""
    for piece in reader.entries[name].chunks:
        region = {"offsets": piece.offsets, "sizes": piece.sizes}
        places = overlap(block.offsets, block.sizes, **region, head_dim=None)
        for here, there in places if block.sizes else [((), ())]:
            with reader.open_piece(MetadataIndex(name, piece.offsets)) as opened:
                reader.copy(opened, there, into=into[here])
    reader.close()  # or a thousand checkpoints are as many open files


def average(steps: Sequence[Path], target: Path, *, kind: Kind, decay: float) -> None:
    """Write the average of these checkpoints, from the oldest to the newest, as the folder
    `target`.

    Raises:
        CheckpointError: Their tensors differ, or a file is damaged; nothing is at `target`.
    """
    readers = [TensorReader(step / "model") for step in steps]
    for reader in readers:
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    check_tensors(readers)
    last = storage.read_manifest(steps[-1])
    about: dict[str, Any] = {"kind": kind, "steps": [str(step) for step in steps]}
    about |= {"decay": decay} if kind == "ema" else {}
    divisor = len(steps) if kind == "uniform" else 1
    factors = coefficients(len(steps), kind=kind, decay=decay)
    draft, files = draft_of(target), HashingFileSystem()
    shutil.rmtree(draft, ignore_errors=True)  # of a process that died
    try:
        writer = dcp.FileSystemWriter(draft / "model", sync_files=False)
        writer.fs = files  # it syncs each file when it is closed
        planner = Averaging(readers, factors=factors, divisor=divisor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        components = {"model": Component(state=MODEL_STATE)}
        manifest = {**{key: last[key] for key in _KEPT if key in last}, "average": about}
        records = {f"model/{name}": record for name, record in files.records.items()}
        storage.complete(target, components, manifest, [records])
    except CheckpointException as error:
        raise CheckpointError(f"{target} was not written: {reasons(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_alike(steps: Sequence[Path]) -> None:
    """Refuse checkpoints of other models, and adapters."""
    settings = [read_settings(step) for step in steps]
    for step, config in zip(steps, settings, strict=True):
        if config.lora.rank:
            raise CheckpointError(
                f"{step} holds a LoRA adapter: the average of its two factors is not the average "
                f"of what they add to a weight, so adapters are not averaged; merge the step that "
                f"you want by python -m torchtitan convert to-hf --lora merged"
            )
    models = [find_model(config.model)[1] for config in settings]
    for step, model in zip(steps[1:], models[1:], strict=True):
        if model != models[0]:
            raise CheckpointError(
                f"checkpoints must be of one model, but {step} has {model} and {steps[0]} "
                f"{models[0]}; name steps of the same model"
            )


def check_tensors(readers: Sequence[TensorReader]) -> None:
    """Refuse checkpoints whose tensors differ in name, shape or type."""

    def kinds(reader: TensorReader) -> dict[str, Any]:
        reader.check_whole(reader.entries)
        return {
            name: f"{entry.properties.dtype} {list(entry.size)}"
            if is_tensor(entry)
            else "no tensor"
            for name, entry in reader.entries.items()
        }

    first = kinds(readers[0])
    if "no tensor" in first.values():
        raise CheckpointError(f"{readers[0].path} must hold tensors alone; name another step")
    for reader in readers[1:]:
        there = kinds(reader)
        for name in sorted(first.keys() | there.keys()):
            if first.get(name) != there.get(name):
                raise CheckpointError(
                    f"checkpoints must hold the same tensors, but '{name}' is "
                    f"{there.get(name, 'missing')} in {reader.path} and "
                    f"{first.get(name, 'missing')} in {readers[0].path}; name steps of one model"
                )


def find_all(path: Path, *, steps: Sequence[int] | None, checksums: bool) -> list[Path]:
    """Return the checkpoints of a run, or of a folder of checkpoints, to average.

    Raises:
        CheckpointError: There are not two, or one that was named is missing or not whole.
    """
    # the newest one lies where the others do, wherever the run keeps them
    folder = path if list_steps(path) else find_run_step(path, verify=False).parent
    there = dict(list_steps(folder))
    found = []
    for step in sorted(there) if steps is None else steps:
        if step not in there:
            raise CheckpointError(
                f"--steps {step} is not in {folder}, which holds {', '.join(map(str, there))}"
            )
        checkpoint = folder / f"step-{step}"
        mistakes = [] if there[step] else ["it has no manifest"]
        mistakes = verify(checkpoint, group=None) if checksums and not mistakes else mistakes
        if mistakes and steps is not None:
            raise CheckpointError(
                f"{checkpoint}, asked for by --steps, is not whole: {summarize(mistakes)}; "
                f"leave it out, or restore it from a copy"
            )
        if mistakes:
            logger.warning("%s is not whole and is left out: %s", checkpoint, summarize(mistakes))
        else:
            found.append(checkpoint)
    if len(found) < 2:
        raise CheckpointError(f"an average needs 2 checkpoints, {folder} gives {len(found)}")
    return found


def main(argv: Sequence[str]) -> int:
    """Read the command line and average; 2 with one message for what the user can mend."""
    args = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        _check(args)
        steps = find_all(args.checkpoint, steps=args.steps, checksums=not args.skip_verify)
        with trusting_stored(args.trust_code):
            check_alike(steps)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            if args.to == "checkpoint":
                average(steps, args.out, kind=args.kind, decay=args.decay)
            else:
                _to_hf(steps, args.out, kind=args.kind, decay=args.decay, tokenizer=args.tokenizer)
    except (UserError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return UserError.exit_code
    names = f"{plural(len(steps), 'step')}: {', '.join(str(step_of(step)) for step in steps)}"
    sys.stdout.write(f"{args.out}: the {args.kind} average of {names}\n")
    return 0


def _to_hf(
    steps: Sequence[Path], out: Path, *, kind: Kind, decay: float, tokenizer: str | None
) -> None:
    config = read_settings(steps[-1])
    if tokenizer is not None:
        config = replace(config, model=replace(config.model, tokenizer_path=tokenizer))
    # a card's figures would be the last step's, not the average's
    settings = replace(describe_export(config, dtype=None), card=None)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        whole = Path(folder) / "average"
        average(steps, whole, kind=kind, decay=decay)
        export(whole, out, settings=settings, group=None)


def _check(args: argparse.Namespace) -> None:
    """Refuse what the command line alone shows to be wrong."""
    if args.out.exists():
        raise CheckpointError(f"{args.out} is there already; name a folder that is not")
    if step_of(args.out) is not None:
        raise CheckpointError(f"--out must not be named as a run's own step, got {args.out.name}")
    if not 0 < args.decay < 1:
        raise CheckpointError(f"--decay must lie between 0 and 1, got {args.decay}; try 0.9")
    if args.steps is not None and any(a >= b for a, b in pairwise(args.steps)):
        raise CheckpointError(f"--steps must ascend, each named once, got {args.steps}")


def _steps(text: str) -> list[int]:
    return [int(step) for step in text.split(",")]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan average",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=local_path, help="folder of a run, or of checkpoints")
    parser.add_argument("--out", type=local_path, required=True, help="folder to make")
    parser.add_argument("--steps", type=_steps, help="such as 100,200,300; all if not given")
    parser.add_argument("--kind", choices=("uniform", "ema"), default="uniform")
    parser.add_argument("--decay", type=float, default=0.9, help="of ema, per checkpoint; 0.9")
    parser.add_argument("--to", choices=("checkpoint", "hf"), default="checkpoint")
    parser.add_argument("--tokenizer", metavar="PATH", help="of hf; else model.tokenizer_path")
    parser.add_argument("--skip_verify", action="store_true", help="do not verify checksums")
    add_trust_code(parser)
    return parser.parse_args(argv)
