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
from torchtitan.base.patterns import matches
from torchtitan.base.stored_json import StoredJSON
from torchtitan.checkpoint.load import Shape, read_tensors, stored_shapes
from torchtitan.checkpoint.rows import HeadDim
from torchtitan.checkpoint.state import COMPONENTS, EMBEDDING, OUTPUT
from torchtitan.checkpoint.storage import STATE, read_manifest, read_state
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
        excludes. Collective; each rank reads its own shards.

        Raises:
            CheckpointError: A name, shape or type does not fit, or a file is damaged.
        """


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
        """Return the parameters of `into` to read; `names` lists those of the source."""
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
        """The manifest. Collective at the first use."""
        return on_first_rank(lambda: read_manifest(self.path), group=self.group)

    def state(self, component: str, *, types: Mapping[str, type] | None = None) -> StoredJSON:
        """Return the state of a component without its tensors; check the `types` of its values."""
        return on_first_rank(
            lambda: read_state(self.path, component).check_types(types or {}),
            group=self.group,
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


_ORDERS: Mapping[RopeOrder, str] = {
    "interleaved": "interleaved order: channels (2i, 2i + 1) are rotated together",
    "halves": "half-split order: channels (i, i + D/2) are rotated together",
}


@dataclass(frozen=True, kw_only=True)
class DCPFolder:
    """The weights in a DCP folder of another writer."""

    path: Path
    group: dist.ProcessGroup | None
    """Ranks that read together. None: this process only."""
    filter: ParameterFilter
    rope_head_dim: HeadDim
    """Head width of the parameters that are stored in the half-split order."""

    def shapes(self) -> Mapping[str, Shape | None]:
        """Return the shapes of all entries."""
        return stored_shapes(self.path.parent, self.path.name, group=self.group)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill parameters in place."""
        stored, excludes = self.shapes(), self.filter.excludes
        wanted = self.filter.wanted(into, names=stored.keys)
        parameters = union(dict.fromkeys(into), group=self.group)
        others = {
            name
            for name, shape in stored.items()
            if name not in parameters
            and not excludes(name)
            and not (shape is not None and name.partition(".")[0] not in COMPONENTS[1:])
        }
        has_tied_copy = OUTPUT not in parameters and stored.get(OUTPUT) is not None
        has_tied_copy = has_tied_copy and not excludes(OUTPUT)
        skipped = {*others, *([OUTPUT] if has_tied_copy else [])}
        read_tensors(
            self.path.parent,
            self.path.name,
            into=wanted,
            group=self.group,
            may_skip=lambda name: name in skipped or excludes(name),
            rope_head_dim=self.rope_head_dim,
        )
        if has_tied_copy:
            self._check_tied(wanted.get(EMBEDDING))
        if others:
            shown = ", ".join(sorted(others)[:8]) + (" ..." if len(others) > 8 else "")
            logger.info("Skipped %d entries that are not parameters: %s", len(others), shown)

    def _check_tied(self, embedding: Tensor | None) -> None:
        """Check that the stored head equals the embedding to which this model ties it.

        Raises:
            CheckpointError: They differ: the model would compute with another head.
        """
        head = {} if embedding is None else {OUTPUT: embedding.clone()}
        read_tensors(self.path.parent, self.path.name, into=head, group=self.group)
        same = embedding is None or torch.equal(local_part(embedding), local_part(head[OUTPUT]))
        found = on_every_rank(lambda: (embedding is not None, same), group=self.group)
        if not (any(held for held, _ in found) and all(equal for _, equal in found)):
            raise CheckpointError(
                f"this model ties {OUTPUT} to {EMBEDDING}, and {self.path} holds different values; "
                f"use a model.flavor without tied weights, or skip the head: "
                f'checkpoint.exclude_from_loading = ["{OUTPUT}"]'
            )
        logger.info("Skipped %s: it equals %s, to which this model ties it", OUTPUT, EMBEDDING)


def row_order(
    place: Path,
    *,
    stated: RopeOrder | None,
    setting: Literal["auto", "interleaved", "halves"],
    spec: ModelSpec,
    may_assume: bool,
) -> RopeOrder:
    """Return the row order of wq and wk in weights of another writer, and log its origin.

    Args:
        place: The weights, for messages.
        stated: Order that the weights state themselves.
        setting: `checkpoint.initial_load_rope`.
        spec: Family of the model.
        may_assume: Whether to assume torchtitan 0.2's order if nothing states one.

    Raises:
        CheckpointError: The setting contradicts the weights, or nothing states the order.
    """
    if stated is not None and setting not in ("auto", stated):
        raise CheckpointError(
            f'checkpoint.initial_load_rope = "{setting}" contradicts {place}, which states '
            f'"{stated}"; remove the setting'
        )
    if stated is not None or setting != "auto":
        order = stated or cast(RopeOrder, setting)
        logger.info("%s has wq and wk in %s", place, _ORDERS[order])
        return order
    usual = spec.torchtitan_rope
    if usual != "interleaved" and not may_assume:
        raise CheckpointError(
            f"{place} does not state the row order of wq and wk: torchtitan 0.2 writes {spec.name} "
            f"with {usual}, this library with interleaved, under the same names; write "
            f'checkpoint.initial_load_rope = "{usual}" or "interleaved"'
        )
    logger.log(
        logging.INFO if usual == "interleaved" else logging.WARNING,
        "%s does not state the row order of wq and wk. Assuming that torchtitan 0.2 wrote %s in "
        "%s; otherwise set checkpoint.initial_load_rope",
        place,
        spec.name,
        _ORDERS[usual],
    )
    return usual


def stated_order(folder: Path) -> RopeOrder | None:
    """Return the row order that a DCP folder of weights states, None if it states none."""
    if not (folder / STATE).is_file():
        return None
    stated = read_state(folder.parent, folder.name).get("rope")
    if stated is not None and (not isinstance(stated, str) or stated not in _ORDERS):
        raise CheckpointError(
            f"{folder / STATE}: rope must be {' or '.join(_ORDERS)}, got {str(stated)[:60]!r}"
        )
    return cast(RopeOrder | None, stated)
