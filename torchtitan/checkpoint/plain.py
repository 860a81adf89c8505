"""A DCP folder of another writer as a source of weights.

torchtitan 0.2 writes one folder per step: parameters under their names, everything else under the
name of its component, much of it as pickles, which are never read. Other writers save a model's
`state_dict`. The order of the rows of wq and wk (`rows.py`) follows from neither names nor shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.ranks import on_every_rank, union
from torchtitan.checkpoint.rows import HeadDim
from torchtitan.checkpoint.source import Selection
from torchtitan.checkpoint.state import COMPONENTS, EMBEDDING, OUTPUT
from torchtitan.models.init import local_part
from torchtitan.models.spec import ModelSpec, RopeOrder

logger = logging.getLogger(__name__)
_IN_WORDS: Mapping[RopeOrder, str] = {
    "interleaved": "interleaved, as here: channels (2i, 2i + 1) turn together",
    "halves": "in halves: channels (i, i + D/2) turn together",
}


@dataclass(frozen=True, kw_only=True)
class PlainFolder:
    """The weights of a DCP folder without our manifest: a `WeightSource`."""

    path: Path
    group: dist.ProcessGroup | None
    selection: Selection
    in_halves: HeadDim
    """The parameters whose rows lie in halves there."""

    def names(self) -> Collection[str]:
        """Return the names of all entries."""
        return self._stored().keys()

    def _stored(self) -> Mapping[str, bool]:
        return storage.stored_names(self.path.parent, self.path.name, group=self.group)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill parameters in place."""
        selection, stored = self.selection, self._stored()
        wanted = selection.wanted(into, names=stored.keys)
        parameters = union(dict.fromkeys(into), group=self.group)
        beside = {
            name
            for name, is_tensor in stored.items()
            if name not in parameters
            and not selection.leaves_out(name)
            and not (is_tensor and name.partition(".")[0] not in COMPONENTS[1:])
        }
        has_copy = OUTPUT not in parameters and stored.get(OUTPUT, False)
        has_copy = has_copy and not selection.leaves_out(OUTPUT)
        skipped = {*beside, *([OUTPUT] if has_copy else [])}
        storage.read_tensors(
            self.path.parent,
            self.path.name,
            into=wanted,
            group=self.group,
            leaves_out=lambda name: name in skipped or selection.leaves_out(name),
            may_grow=selection.may_grow,
            in_halves=self.in_halves,
        )
        if has_copy:
            self._check_tied(wanted.get(EMBEDDING))
        if beside:
            shown = ", ".join(sorted(beside)[:8]) + (" ..." if len(beside) > 8 else "")
            logger.info("Not read, as no parameters: %d entries: %s", len(beside), shown)

    def _check_tied(self, embedding: Tensor | None) -> None:
        """Compare the head that a tied model was saved with and its embedding, shard by shard."""
        # filled with the rows that are stored: those behind them are the embedding's own
        head = {} if embedding is None else {OUTPUT: embedding.clone()}
        storage.read_tensors(
            self.path.parent,
            self.path.name,
            into=head,
            group=self.group,
            may_grow=(OUTPUT,) if EMBEDDING in self.selection.may_grow else (),
        )
        same = embedding is None or torch.equal(local_part(embedding), local_part(head[OUTPUT]))
        found = on_every_rank(lambda: (embedding is not None, same), group=self.group)
        if not (any(held for held, _ in found) and all(equal for _, equal in found)):
            raise CheckpointError(
                f"{self.path} must hold the same in {OUTPUT} as in {EMBEDDING}, since this model "
                f"ties them, got others; take a model.flavor that is not tied, or leave the head "
                f'out: checkpoint.exclude_from_loading = ["{OUTPUT}"]'
            )
        logger.info("%s is %s, to which this model ties it: not read twice", OUTPUT, EMBEDDING)


def row_order(
    place: Path,
    *,
    said: RopeOrder | None,
    setting: Literal["auto", "interleaved", "halves"],
    spec: ModelSpec,
    may_assume: bool,
) -> RopeOrder:
    """Return in which order weights of another writer have the rows of wq and wk, and log why.

    `said`: what the place says itself. `may_assume`: where nothing says it, that torchtitan 0.2
    wrote them.

    Raises:
        CheckpointError: The place says another order than the setting, or neither says one.
    """
    if said is not None and setting not in ("auto", said):
        raise CheckpointError(
            f'checkpoint.initial_load_rope = "{setting}" is not what {place} says of itself, '
            f'"{said}"; remove it'
        )
    if said is not None or setting != "auto":
        order = said or cast(RopeOrder, setting)
        logger.info("%s has the rows of wq and wk %s", place, _IN_WORDS[order])
        return order
    usual = spec.torchtitan_rope
    if usual != "interleaved" and not may_assume:
        raise CheckpointError(
            f"{place} does not say how the rows of wq and wk lie: torchtitan 0.2 writes "
            f"{spec.name} in {usual}, this library interleaved, by the same names; write "
            f'checkpoint.initial_load_rope = "{usual}" or "interleaved"'
        )
    logger.log(
        logging.INFO if usual == "interleaved" else logging.WARNING,
        "%s does not say how the rows of wq and wk lie: they are taken as torchtitan 0.2 writes "
        "%s, %s; if another writer made it, set checkpoint.initial_load_rope",
        place,
        spec.name,
        _IN_WORDS[usual],
    )
    return usual


def said_order(folder: Path) -> RopeOrder | None:
    """Return the order of rows that a DCP folder of weights says it has, if it says one."""
    if not (folder / storage.STATE).is_file():
        return None
    said = storage.read_state(folder.parent, folder.name).get("rope")
    if said is not None and (not isinstance(said, str) or said not in _IN_WORDS):
        raise CheckpointError(
            f"{folder / storage.STATE} must say rope as {' or '.join(_IN_WORDS)}, got "
            f"{str(said)[:60]!r}; get the folder again"
        )
    return cast(RopeOrder | None, said)
