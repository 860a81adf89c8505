"""Add the blocks that a rehearsal skipped to its record.

A rehearsal runs a few blocks of each stage. One of them, or a period of them, is the *template* of
the skipped ones. Its neighbours are of the same kind, so it does what the skipped ones would do.
The record is cut into parts, each a block's forward or backward. Parts of a template are copied to
the places where the skipped blocks run.

A copied death has to end the right birth. It is found by its distance in blocks: the gathered
weights of the next block, an activation of the same block. A death outside of the copied parts ends
the births of all copies.

Three checks guard this: the neighbours of a template equal it, each copied death finds a living
birth, and no copied birth is left if its template dies. If a check fails, all blocks have to run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.tools.plan.tape import Entry, Phase, Piece, Record

NEAR = 2
"""Weights are gathered at most this number of blocks ahead, and freed at most as late."""


class CannotCopyError(Exception):
    """The record does not repeat where it should."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """Consecutive blocks of a stage that represent the skipped ones after them."""

    blocks: tuple[int, ...]
    """Blocks of the stage that ran, in order."""
    first: int
    """Index in `blocks` of the template's first block."""
    period: int
    """Number of its blocks."""
    times: int
    """Number of copies to add."""

    def position(self, index: int, copy: int) -> int:
        """Return the position of a copy of a block among all blocks of the stage."""
        if index < self.first:
            return index
        is_after = index >= self.first + self.period
        return index + self.period * (self.times if is_after else copy)

    def at(self, position: int) -> tuple[int, int]:
        """Return the index in `blocks`, and the copy, of the block at a position."""
        if position < self.first:
            return position, 0
        copy, offset = divmod(position - self.first, self.period)
        if copy > self.times:
            return position - self.period * self.times, 0
        return self.first + offset, copy


class _Key(NamedTuple):
    template: Template | None
    place: int
    """Index of the block in the template's `blocks`."""
    phase: Phase | None
    turn: int
    """Number of earlier parts of the same block and phase: the microbatch."""

    @property
    def num_copies(self) -> int:
        template = self.template
        if template is None or not 0 <= self.place - template.first < template.period:
            return 1
        return 1 + template.times


class _Part(NamedTuple):
    """Consecutive entries of one block, which are copied together."""

    key: _Key
    piece: Piece
    end: int


def copy_blocks(record: Record, templates: Sequence[Template]) -> Record:
    """Return the record of all blocks; raise CannotCopyError if the blocks do not do the same."""
    return _Copier(record, templates).run()


class _Copier:
    def __init__(self, record: Record, templates: Sequence[Template]) -> None:
        self._entries = record.entries
        self._parts: list[_Part] = []
        block_positions = {
            block: (t, index) for t in templates for index, block in enumerate(t.blocks)
        }
        turns: Counter[tuple[Phase | None, int | None]] = Counter()
        held: Counter[tuple[str, bool]] = Counter()
        for piece, end in record.bounds():
            template, position = block_positions.get(
                -1 if piece.block is None else piece.block, (None, 0)
            )
            key = _Key(template, position, piece.phase, turns[piece[1:]])
            turns[piece[1:]] += 1
            self._parts.append(_Part(key, piece, end))
            if piece.phase == "state":
                for entry in record.entries[piece.start : end]:
                    held[entry.kind, False] += entry.size
                    held[entry.kind, True] += entry.size * key.num_copies
        # trained parameters have an optimizer's state, unless the optimizer has no state
        held_kind = "optimizer" if held["optimizer", False] else "weights"
        self._growth = held[held_kind, True] / max(1, held[held_kind, False])
        """Factor for the update, whose operators take all trained parameters at once."""
        self._part_at = {part.key: part for part in self._parts}
        self._part_of = [part for part in self._parts for _ in range(part.piece.start, part.end)]
        self._out = Record([], [])
        self._born: dict[tuple[int, int], int] = {}
        """Index in `_out` of each living birth, by its entry and copy."""

    def run(self) -> Record:
        """Write the record of all blocks from the parts that ran."""
        for part in self._parts:
            self._check_neighbour(part)
        for part, copy in self._order():
            _, phase, block = part.piece
            if part.key.template is not None and block is not None:
                block += part.key.template.period * copy
            self._out.pieces.append(Piece(len(self._out.entries), phase, block))
            for index in range(part.piece.start, part.end):
                self._copy(index, copy, is_update=phase == "update")
        freed = {entry.born for entry in self._entries if entry.what == "death"}
        left = [self._entries[index] for index, _ in self._born if index in freed]
        if left:
            raise CannotCopyError(f"{len(left)} copies are never freed, the first is {left[0]}")
        return self._out

    def _check_neighbour(self, part: _Part) -> None:
        if part.key.template is None or part.key.num_copies == 1:
            return
        new_place = part.key.place + part.key.template.period
        partner = self._part_at.get(part.key._replace(place=new_place))
        if partner is None or self._work(part) != self._work(partner):
            raise CannotCopyError(f"blocks are not alike in their {part.key.phase}")

    def _work(self, part: _Part) -> list[tuple[object, ...]]:
        return [entry[:3] for entry in self._entries[part.piece.start : part.end]]

    def _order(self) -> Iterator[tuple[_Part, int]]:
        """Yield the parts of all blocks: copies follow in forward and precede in backward."""
        parts = deque(self._parts)
        while parts:
            key = parts[0].key
            if key.template is None or key.num_copies == 1:
                yield parts.popleft(), 0
                continue
            template, is_backward = key.template, key.phase == "backward"
            group = [parts.popleft() for _ in range(min(template.period, len(parts)))]
            offsets = list(range(template.first, template.first + template.period))
            copies = list(range(key.num_copies))
            if is_backward:
                offsets.reverse()
                copies.reverse()
            if [part.key for part in group] != [key._replace(place=offset) for offset in offsets]:
                raise CannotCopyError(f"the blocks of a template do not follow one another: {key}")
            yield from ((part, copy) for copy in copies for part in group)

    def _copy(self, index: int, copy: int, *, is_update: bool) -> None:
        entry, out = self._entries[index], self._out.entries
        if entry.what == "birth":
            self._born[index, copy] = len(out)
        if entry.what != "death":
            grows = is_update and entry.what != "message"
            size = round(entry.size * self._growth) if grows else entry.size
            out.append(entry._replace(size=size))
            return
        for birth in self._births(entry, self._part_of[index].key, copy):
            born = self._born.pop(birth, None)
            if born is None:
                raise CannotCopyError(f"no storage lives where {entry} frees it")
            out.append(entry._replace(size=out[born].size, born=born))

    def _births(self, death: Entry, death_key: _Key, copy: int) -> Sequence[tuple[int, int]]:
        """Return the births, with their copies, that a copy of a death ends."""
        part = self._part_of[death.born]
        birth_key, template = part.key, part.key.template
        distance = birth_key.place - death_key.place
        if template is None or death_key.template is not template or abs(distance) > NEAR:
            if copy:
                raise CannotCopyError(f"each copy frees one storage: {death}")
            is_other = death_key.template is not None and death_key.template is not template
            return [(death.born, c) for c in range(1 if is_other else birth_key.num_copies)]
        copy_place, of_copy = template.at(template.position(death_key.place, copy) + distance)
        target = self._part_at[birth_key._replace(place=copy_place)]
        return [(target.piece.start + death.born - part.piece.start, of_copy)]
