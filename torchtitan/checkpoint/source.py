"""What weights are read from.

A `WeightSource` is a step of ours (below), a DCP folder of another writer (`plain.py`), or a folder
or file with Hugging Face's names (`hf/`). Whoever starts a run, generates text or converts opens
one and reads it; nothing else differs between them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from torchtitan.checkpoint import storage
from torchtitan.checkpoint.files import Content, checked_kinds
from torchtitan.checkpoint.ranks import on_first_rank


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
    """A step of ours: its weights, and the components beside them. Ranks read it together."""

    path: Path
    group: dist.ProcessGroup | None
    selection: Selection = ALL

    @cached_property
    def manifest(self) -> Content:
        """What the step says of itself."""
        return on_first_rank(lambda: storage.read_manifest(self.path), group=self.group)

    def state(self, component: str, *, kinds: Mapping[str, type] | None = None) -> Content:
        """Return what a component knows beside its tensors; `kinds`: of which types entries are."""
        return on_first_rank(
            lambda: checked_kinds(storage.read_state(self.path, component), kinds=kinds or {}),
            group=self.group,
        )

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
