"""Put blocks that were left out of a rehearsal back into its record.

A rehearsal runs a few blocks of each stage. One of them, or one period of them where only every
n-th is recomputed, is the *template*: it has its like before and behind it, so what it does is what
the blocks that were left out, right behind it, would do. Its pieces of the record are copied, in
forward behind it, in backward before it.

What has to be found is the birth that a copied death ends. Every piece belongs to a block, so a
birth is known by its block, *relative* to that of the death, and by its place in a piece: the
gathered weights of the next block, an activation of one's own. What is freed far away or outside of
blocks is freed for each copy. That the blocks beside a template are its like is checked, and that
copies leave nothing behind; if they do, all blocks must be run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan.tools.plan.tape import Entry, Kind, Phase, Piece, Record

NEAR = 2
"""How many blocks ahead weights are gathered, or behind they are freed, at most."""


class CannotUnrollError(Exception):
    """The record does not repeat itself where it should."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """A stage of which blocks were left out, right behind those that stand for them."""

    blocks: tuple[int, ...]
    """Of the stage that were run, in their order."""
    first: int
    """The place in `blocks` where the template begins."""
    period: int
    """How many blocks it has."""
    times: int
    """How often it is to follow once more."""

    def place(self, index: int, copy: int) -> int:
        """Return the place of a copy of a block among all blocks of the stage."""
        if index < self.first:
            return index
        is_behind = index >= self.first + self.period
        return index + self.period * (self.times if is_behind else copy)

    def at(self, place: int) -> tuple[int, int]:
        """Return the block, by its index in `blocks`, and the copy at such a place."""
        if place < self.first:
            return place, 0
        copy, offset = divmod(place - self.first, self.period)
        if copy > self.times:
            return place - self.period * self.times, 0
        return self.first + offset, copy

    def holds(self, index: int) -> bool:
        """Tell whether a block, by its index, is of the template."""
        return self.first <= index < self.first + self.period


def unroll(record: Record, templates: Sequence[Template]) -> Record:
    """Return the record of all blocks.

    Raises:
        CannotUnrollError: The blocks are not alike in what they do.
    """
    return _Unroller(record, templates).unroll()


@dataclass(frozen=True)
class _Place:
    """Where a piece is in the record."""

    template: Template | None
    index: int
    """Its block's index in the template's blocks."""
    phase: Phase | None
    turn: int
    """How often this phase of this block has come before: which microbatch."""


class _Unroller:
    def __init__(self, record: Record, templates: Sequence[Template]) -> None:
        self._entries, self._bounds = record.entries, list(record.bounds())
        stages = {b: (t, i) for t in templates for i, b in enumerate(t.blocks)}
        turns: Counter[tuple[Phase | None, int | None]] = Counter()
        self._places: list[_Place] = []
        self._piece_at: dict[_Place, int] = {}
        self._piece_of: list[int] = []
        for number, (piece, end) in enumerate(self._bounds):
            template, index = (
                (None, 0) if piece.block is None else stages.get(piece.block, (None, 0))
            )
            place = _Place(template, index, piece.phase, turns[piece[1:]])
            turns[piece[1:]] += 1
            self._places.append(place)
            self._piece_at[place] = number
            self._piece_of += [number] * (end - piece.start)
        held: Counter[tuple[Kind, bool]] = Counter()
        for place, (piece, end) in zip(self._places, self._bounds, strict=True):
            if place.phase == "state":
                template = place.template
                is_copied = template is not None and template.holds(place.index)
                times = 1 + template.times if template is not None and is_copied else 1
                for entry in self._entries[piece.start : end]:
                    held[entry.kind, False] += entry.size
                    held[entry.kind, True] += entry.size * times
        # what is trained has an optimizer's state, if that has any
        kind: Kind = "optimizer" if held["optimizer", False] else "weights"
        self._growth = held[kind, True] / max(1, held[kind, False])
        """Of what is trained: as the update's operators, of all parameters at once, grow."""
        self._out: list[Entry] = []
        self._born: dict[tuple[int, int], int] = {}
        """By entry and copy of a birth: its index in what comes out, while it lives."""

    def unroll(self) -> Record:
        self._check_likeness()
        pieces = []
        for number, copy in self._order():
            piece, end = self._bounds[number]
            place = self._places[number]
            block = piece.block
            if place.template is not None and block is not None:
                block += place.template.period * copy
            pieces.append(Piece(len(self._out), piece.phase, block))
            for index in range(piece.start, end):
                self._emit(index, copy)
        freed = {entry.born for entry in self._entries if entry.what == "death"}
        left = [key for key in self._born if key[0] in freed]
        if left:
            entry = self._entries[left[0][0]]
            raise CannotUnrollError(f"{len(left)} copies are freed nowhere, the first {entry}")
        return Record(self._out, pieces)

    def _order(self) -> Iterator[tuple[int, int]]:
        """Yield pieces and their copies in the order of the unrolled step."""
        number = 0
        while number < len(self._bounds):
            place = self._places[number]
            template = place.template
            if template is None or not template.holds(place.index):
                yield number, 0
                number += 1
                continue
            group = range(number, number + template.period)
            steps = range(template.period)
            indices = [template.first + step for step in steps]
            if place.phase == "backward":
                indices.reverse()
            found = [self._places[n] if n < len(self._places) else None for n in group]
            expected = [_Place(template, i, place.phase, place.turn) for i in indices]
            if found != expected:
                raise CannotUnrollError(
                    f"the blocks of a template do not follow one another: {found}"
                )
            copies = range(template.times + 1)
            for copy in reversed(copies) if place.phase == "backward" else copies:
                yield from ((n, copy) for n in group)
            number += template.period

    def _emit(self, index: int, copy: int) -> None:
        entry = self._entries[index]
        if self._places[self._piece_of[index]].phase == "update" and entry.what != "message":
            entry = entry._replace(size=round(entry.size * self._growth))
        if entry.what == "birth":
            self._born[index, copy] = len(self._out)
        if entry.what != "death":
            self._out.append(entry)
            return
        for target in self._targets(index, copy):
            born = self._born.pop(target, None)
            if born is None:
                raise CannotUnrollError(f"nothing lives where {entry} frees it")
            self._out.append(entry._replace(size=self._out[born].size, born=born))

    def _targets(self, index: int, copy: int) -> list[tuple[int, int]]:
        """Return the births, and which copies of them, that a copy of a death ends."""
        born = self._entries[index].born
        here, there = (self._places[self._piece_of[i]] for i in (index, born))
        template = there.template
        if template is None or here.template not in (None, template):
            if copy:
                raise CannotUnrollError(
                    f"each block frees what one alone has: {self._entries[index]}"
                )
            return [(born, 0)]
        is_copied = template.holds(there.index)
        distance = there.index - here.index
        if here.template is None or abs(distance) > NEAR:
            if copy:
                raise CannotUnrollError(
                    f"each block frees what one far away has: {self._entries[index]}"
                )
            return [(born, c) for c in range(template.times + 1 if is_copied else 1)]
        found, of_copy = template.at(template.place(here.index, copy) + distance)
        if found == there.index:
            return [(born, of_copy)]
        piece = self._piece_at[_Place(template, found, there.phase, there.turn)]
        offset = born - self._bounds[self._piece_of[born]][0].start
        return [(self._bounds[piece][0].start + offset, of_copy)]

    def _check_likeness(self) -> None:
        """Check that the blocks behind a template do what it does."""
        for number, place in enumerate(self._places):
            template = place.template
            if template is None or not template.holds(place.index):
                continue
            behind = _Place(template, place.index + template.period, place.phase, place.turn)
            other = self._piece_at.get(behind)
            if other is None or self._codes(number) != self._codes(other):
                raise CannotUnrollError(f"blocks are not alike in their {place.phase}")

    def _codes(self, number: int) -> list[tuple[object, ...]]:
        piece, end = self._bounds[number]
        return [entry[:3] for entry in self._entries[piece.start : end]]
