"""What weights are read from, and which folder a path means.

A `WeightSource` is a step of ours (below), a DCP folder of another writer (`plain.py`), or a folder
or file with Hugging Face's names (`hf/`). Whoever starts a run, generates text or converts opens
one and reads it; nothing else differs between them.

A step that was named is that step or an error. Among several, a damaged one is passed over for the
one before it. A folder without our checksums is only taken by its own name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.metadata import METADATA

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Weights on disk, opened by all ranks that read them together."""

    @property
    def path(self) -> Path:
        """Where they are."""

    def names(self) -> Collection[str]:
        """Return the name of every tensor: ours, where we have one. All ranks call it together."""

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill these parameters of this rank in place, but for those that its `Selection` leaves
        out; all ranks call it together, each with its own shards.

        Raises:
            CheckpointError: A name, shape or type does not fit, or a file is damaged.
        """


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which parameters are read from a source; all others keep their initial values."""

    exclude: tuple[str, ...] = ()
    """Shell patterns of parameters that are left out, here and there."""
    may_grow: tuple[str, ...] = ()
    """Parameters of which the source may have fewer rows."""
    optional: Callable[[str], bool] | None = None
    """Tells the parameters that are left out where the source has none of them, as an adapter."""

    def leaves_out(self, name: str) -> bool:
        """Tell whether a pattern matches."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def wanted(
        self, into: Mapping[str, Tensor], *, names: Callable[[], Collection[str]]
    ) -> dict[str, Tensor]:
        """Return the parameters to read from a source of these names."""
        wanted = {name: t for name, t in into.items() if not self.leaves_out(name)}
        optional = self.optional
        if optional is not None and not any(map(optional, names())):
            return {name: t for name, t in wanted.items() if not optional(name)}
        return wanted


ALL = Selection()


@dataclass(frozen=True, kw_only=True)
class Step:
    """The weights of a step of ours. Its other components lie beside them."""

    path: Path
    group: dist.ProcessGroup | None
    selection: Selection = ALL

    def names(self) -> Collection[str]:
        """Return the names of the stored parameters."""
        return storage.stored_names(self.path, "model", group=self.group).keys()

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill parameters in place."""
        storage.read_tensors(
            self.path,
            "model",
            into=self.selection.wanted(into, names=self.names),
            group=self.group,
            leaves_out=self.selection.leaves_out,
            may_grow=self.selection.may_grow,
        )


def is_plain_dcp(path: Path) -> bool:
    """Tell whether another writer made this DCP folder: it has no manifest of ours."""
    return (path / METADATA).is_file() and not (path / storage.MANIFEST).is_file()


def newest_step(
    folder: Path, *, verify: bool, group: dist.ProcessGroup | None, finish: bool = False
) -> Path | None:
    """Return the newest whole step of ours; `finish` completes commits that were interrupted."""
    step = storage.newest_whole(folder, group=group, verify=verify, finish=finish)
    return None if step is None else folder / f"step-{step}"


def checked_step(source: Path, *, verify: bool, group: dist.ProcessGroup | None) -> Path:
    """Return a step that was named, which no other may replace.

    Raises:
        CheckpointError: It is damaged.
    """
    mistakes = storage.verify(source, group=group) if verify else []
    if mistakes:
        raise CheckpointError(
            f"{source}, asked for by name, is damaged: {storage.summary(mistakes)}; name another "
            f"step, or read it as it is: checkpoint.verify_on_load = false (--skip_verify of a "
            f"script)"
        )
    return source


def find_step(
    path: Path,
    *,
    subfolder: str,
    load_step: int = -1,
    verify: bool,
    group: dist.ProcessGroup | None,
) -> Path:
    """Return the folder that `path` means: a step of ours, itself or the newest whole one of a
    checkpoint folder or a run; or the DCP folder of another writer that it is.

    `subfolder`: where a run has its checkpoints. `load_step` names one among several; -1: none.

    Raises:
        CheckpointError: There is no whole checkpoint, or the step that was named is damaged.
    """
    folders = (path, path / subfolder)
    if load_step != -1:
        named = [folder / f"step-{load_step}" for folder in folders]
    else:
        named = [path, path.parent] if path.name == "model" else [path]

    def look() -> tuple[Path, bool] | None:
        ours = [(step, True) for step in named if (step / storage.MANIFEST).is_file()]
        return next(iter([*ours, *((step, False) for step in named if is_plain_dcp(step))]), None)

    found = storage.on_first_rank(look, group=group)
    if found is not None:
        step, is_ours = found
        if is_ours:
            return checked_step(step, verify=verify, group=group)
        logger.info("%s cannot be verified: it has no checksums", step)
        return step
    if load_step != -1:
        raise CheckpointError(
            f"checkpoint.load_step {load_step} is not in {path}: it must be a step of "
            f"initial_load_path, a run's folder or a folder of checkpoints; name another"
        )
    for folder in folders:
        plain = storage.on_first_rank(partial(_plain_steps, folder), group=group)
        if plain:
            raise CheckpointError(
                f"{path} holds steps of another writer, without checksums to find the newest whole "
                f"one by; name one: {', '.join(plain)}"
            )
        newest = newest_step(folder, verify=verify, group=group)
        if newest is not None:
            return newest
    instead = storage.on_first_rank(lambda: _found_instead(path, subfolder), group=group)
    raise CheckpointError(
        f"a checkpoint must be the folder of a step, of checkpoints or of a run, got {path}, which "
        f"{instead}"
    )


def _plain_steps(folder: Path) -> list[str]:
    """Return the newest step folders of another writer, where there is none of ours."""
    steps = storage.list_steps(folder)
    if any(has_manifest for _, has_manifest in steps):
        return []
    paths = [folder / f"step-{step}" for step, _ in reversed(steps)]
    return [str(path) for path in paths if is_plain_dcp(path)][:3]


def _found_instead(path: Path, subfolder: str) -> str:
    if not path.is_dir():
        return "is a file: name its folder" if path.exists() else "does not exist"
    runs = sorted(str(run.parent) for run in path.glob(f"*/{subfolder}") if run.is_dir())
    if runs:
        return f"holds runs; name one of them: {', '.join(runs[:8])}"
    return "holds no whole checkpoint; train with --checkpoint.enable to make one"
