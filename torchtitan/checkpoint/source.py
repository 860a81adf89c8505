"""Sources of weights.

A `WeightSource` is a checkpoint of this library (`Checkpoint`), a DCP folder of another writer
(`DCPFolder`), or a Hugging Face folder or file (`hf/`). Training, generation and conversion open
one and read it in the same way.

torchtitan 0.2 writes one DCP folder per step: parameters under their names, everything else under
the name of its component, much of it as pickles, which are never read. Other writers save a model's
`state_dict`. Neither names nor shapes tell the row order of wq and wk (`rows.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON
from torchtitan.base.patterns import matches
from torchtitan.checkpoint.checksums import read_manifest
from torchtitan.checkpoint.reader import Shape, read_tensors, stored_shapes
from torchtitan.checkpoint.rows import HeadsOf
from torchtitan.checkpoint.settings import COMPONENTS
from torchtitan.checkpoint.state import EMBEDDING, OUTPUT
from torchtitan.checkpoint.storage import STATE, read_state, step_of
from torchtitan.mesh.ranks import on_every_rank, on_first_rank, union
from torchtitan.models.init import local_part
from torchtitan.models.spec import ModelSpec, RopeOrder

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Stored weights, opened by all ranks that read them together."""

    @property
    def path(self) -> Path:
        """File or folder of the weights."""

    def shapes(self) -> Mapping[str, Shape | None]:
        """Return the shapes of all tensors, by our names. Collective."""

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill the parameters of this rank in place, except those that its `ParameterFilter`
        excludes. Collective; each rank reads its own shards. Raises CheckpointError if a name,
        shape or type does not fit, or a file is damaged."""


@dataclass(frozen=True, kw_only=True)
class ParameterFilter:
    """Which parameters to read from a source. The others keep their initial values."""

    exclude: tuple[str, ...] = ()
    """Shell patterns of parameters to exclude, of the model and of the source."""
    optional: Callable[[str], bool] | None = None
    """Parameters that are skipped together if the source lacks all of them, e.g. adapters."""

    def excludes(self, name: str) -> bool:
        """Return whether a pattern matches."""
        return matches(name, self.exclude)

    def wanted(
        self, into: Mapping[str, Tensor], *, names: Callable[[], Collection[str]]
    ) -> dict[str, Tensor]:
        """Return the parameters of `into` to read; `names` lists the parameters of the source."""
        wanted = {name: t for name, t in into.items() if not self.excludes(name)}
        optional = self.optional
        if optional is not None and not any(map(optional, names())):
            return {name: t for name, t in wanted.items() if not optional(name)}
        return wanted


ALL = ParameterFilter()
EXPORTED = ("torch.float16", "torch.bfloat16", "torch.float32")
"""Types of `checkpoint.export_dtype`."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint of this library: its weights and the components beside them."""

    path: Path
    """The `step-N` folder."""
    group: dist.ProcessGroup | None
    """Ranks that read together. None: this process only."""
    filter: ParameterFilter = ALL

    @cached_property
    def manifest(self) -> StoredJSON:
        """The manifest. Collective at the first use. Raises CheckpointError if it is missing or
        damaged, or the folder is named for another step."""
        manifest = on_first_rank(lambda: read_manifest(self.path), group=self.group)
        if step_of(self.path) not in (None, manifest["step"]):
            raise CheckpointError(
                f"{self.path} holds step {manifest['step']}; rename it back, or move it away"
            )
        return manifest

    def state(self, component: str, *, types: Mapping[str, type] | None = None) -> StoredJSON:
        """Return the state of a component without its tensors; check the `types` of its values."""
        return on_first_rank(
            lambda: read_state(self.path, component).check_types(types or {}), group=self.group
        )

    def shapes(self) -> Mapping[str, Shape | None]:
        """Return the shapes of the stored parameters."""
        return stored_shapes(self.path, "model", group=self.group)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill parameters in place."""
        read_tensors(
            self.path,
            "model",
            into=self.filter.wanted(into, names=self.shapes),
            group=self.group,
            may_skip=self.filter.excludes,
            # a checkpoint with only weights is an export, in a type of its own
            accepts=EXPORTED if self.manifest["components"] == ["model"] else (),
        )


@dataclass(frozen=True, kw_only=True)
class DCPFolder:
    """The weights in a DCP folder of another writer."""

    path: Path
    group: dist.ProcessGroup | None
    """Ranks that read together. None: this process only."""
    filter: ParameterFilter
    rope_heads: HeadsOf
    """Heads of the parameters that are stored in the half-split order."""

    def shapes(self) -> Mapping[str, Shape | None]:
        """Return the shapes of all entries."""
        return stored_shapes(self.path.parent, self.path.name, group=self.group)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill parameters in place. Entries that are no parameters of a model are not read. Raises
        CheckpointError if names, shapes or types differ, or this model ties a head to the embedding
        that is stored with other values: it would compute with another head."""
        folder, name = self.path.parent, self.path.name
        stored, excludes = self.shapes(), self.filter.excludes
        wanted = self.filter.wanted(into, names=stored.keys)
        parameters = union(dict.fromkeys(into), group=self.group)
        is_tied = OUTPUT not in parameters and bool(stored.get(OUTPUT)) and not excludes(OUTPUT)

        def is_skipped(name: str) -> bool:
            is_other = stored[name] is None or name.partition(".")[0] in COMPONENTS[1:]
            is_other = is_other and name not in parameters
            return excludes(name) or is_other or (is_tied and name == OUTPUT)

        read_tensors(
            folder,
            name,
            into=wanted,
            group=self.group,
            may_skip=is_skipped,
            rope_heads=self.rope_heads,
        )
        if is_tied:
            embedding = wanted.get(EMBEDDING)  # None on a pipeline's later stages
            head = {} if embedding is None else {OUTPUT: embedding.clone()}
            read_tensors(folder, name, into=head, group=self.group)
            is_same = embedding is None or torch.equal(
                local_part(embedding), local_part(head[OUTPUT])
            )
            if not all(on_every_rank(lambda: is_same, group=self.group)):
                raise CheckpointError(
                    f"this model ties {OUTPUT} to {EMBEDDING}, and {self.path} holds different "
                    f"values; use a model.flavor without tied weights, or skip the head: "
                    f'checkpoint.exclude_from_loading = ["{OUTPUT}"]'
                )


def find_row_order(
    folder: Path, *, setting: Literal["auto", "interleaved", "halves"], spec: ModelSpec
) -> RopeOrder:
    """Return the row order of wq and wk in a DCP folder of weights; log one that is assumed.

    `setting` is `checkpoint.initial_load_rope`. Raises CheckpointError if the setting contradicts
    the folder.
    """
    has_state = (folder / STATE).is_file()
    stated = read_state(folder.parent, folder.name).get("rope") if has_state else None
    if setting == "auto" and stated is None:
        order = spec.torchtitan_rope
        logger.log(
            logging.INFO if order == "interleaved" else logging.WARNING,
            "%s does not state the row order of wq and wk. Assuming %s, as torchtitan 0.2 writes "
            "%s; otherwise set checkpoint.initial_load_rope",
            folder,
            order,
            spec.name,
        )
        return order
    if stated not in (None, "interleaved", "halves") or setting not in ("auto", stated or setting):
        raise CheckpointError(
            f"{folder / STATE}: rope must be interleaved or halves, and must not contradict "
            f'checkpoint.initial_load_rope = "{setting}", got {str(stated)[:60]!r}'
        )
    return cast(RopeOrder, stated or setting)
