"""Add the blocks and microbatches that a rehearsal skipped to its record.

A rehearsal runs a few blocks of each stage and a few microbatches of a pipeline. One of them, the
*template*, represents the skipped ones. Its neighbours are of the same kind, so it does what the
skipped ones would do. The record is cut into parts: a block's forward or backward, or an action of
the pipeline's schedule. Parts of a template are copied to the places where the skipped ones run.

A copied death has to end the right birth. Among blocks, it is found by its distance: the gathered
weights of the next block, an activation of the same block. Among microbatches, it is in the copy of
the same microbatch, or a number of actions of the same kind ago. A death outside of the copied
parts ends the births of all copies.

Three checks guard this: the neighbours of a template equal it, each copied death finds a living
birth, and no copied birth is left if its template dies. If a check fails, everything has to run.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from string import digits
from typing import Any, NamedTuple

from torchtitan.parallel.pipeline.layout import PipelineLayout
from torchtitan.parallel.pipeline.schedules import Action, Kind, lower
from torchtitan.tools.plan.tape import Entry, Phase, Piece, Record

NEAR = 2
"""Weights are gathered at most this number of blocks ahead, and freed at most as late."""


class CannotCopyError(Exception):
    """The record does not repeat where it should."""


class _Part(NamedTuple):
    """Consecutive entries that are copied together. `key` is a `_BlockKey` or `_ActionKey`."""

    key: Any
    start: int
    end: int
    pieces: Sequence[Piece]


class _Copier:
    """Writes a record from parts of a shorter one, each with the number of its copy."""

    def __init__(self, record: Record, parts: Iterable[_Part]) -> None:
        self._entries, self._parts = record.entries, list(parts)
        self._part_at = {part.key: part for part in self._parts}
        self._part_of = [part for part in self._parts for _ in range(part.start, part.end)]
        self._out: list[Entry] = []
        self._pieces: list[Piece] = []
        self._born: dict[tuple[int, int | None], int] = {}
        """Index in `_out` of each living birth, by its entry and copy."""

    def _copy(self, index: int, copy: int | None, *, growth: float = 1.0) -> None:
        entry = self._entries[index]
        if entry.what == "birth":
            self._born[index, copy] = len(self._out)
        if entry.what != "death":
            size = entry.size if growth == 1.0 else round(entry.size * growth)
            self._out.append(entry._replace(size=size))
            return
        for birth in self._births(index, copy):
            born = self._born.pop(birth, None)
            if born is None:
                raise CannotCopyError(f"no storage lives where {entry} frees it")
            self._out.append(entry._replace(size=self._out[born].size, born=born))

    def _births(self, index: int, copy: int | None) -> Sequence[tuple[int, int | None]]:
        """Return the births, with their copies, that a copy of a death ends."""
        raise NotImplementedError

    def _finish(self) -> Record:
        freed = {entry.born for entry in self._entries if entry.what == "death"}
        left = [index for index, _ in self._born if index in freed]
        if left:
            first = self._entries[left[0]]
            raise CannotCopyError(f"{len(left)} copies are never freed, the first is {first}")
        return Record(self._out, self._pieces)


# --- blocks --------------------------------------------------------------------------------------


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

    def has(self, index: int) -> bool:
        """Return whether the block at an index of `blocks` is copied."""
        return self.first <= index < self.first + self.period


class _BlockKey(NamedTuple):
    template: Template | None
    place: int
    """Index of the block in the template's `blocks`."""
    phase: Phase | None
    turn: int
    """Number of earlier parts of the same block and phase: the microbatch."""

    @property
    def num_copies(self) -> int:
        is_copied = self.template is not None and self.template.has(self.place)
        return 1 + self.template.times if self.template is not None and is_copied else 1


def copy_blocks(record: Record, templates: Sequence[Template]) -> Record:
    """Return the record of all blocks.

    Raises:
        CannotCopyError: The blocks do not do the same.
    """
    return _BlockCopier(record, templates).run()


class _BlockCopier(_Copier):
    def __init__(self, record: Record, templates: Sequence[Template]) -> None:
        places = {b: (t, i) for t in templates for i, b in enumerate(t.blocks)}
        turns: Counter[tuple[Phase | None, int | None]] = Counter()
        parts = []
        held: Counter[tuple[str, bool]] = Counter()
        for piece, end in record.bounds():
            template, place = places.get(-1 if piece.block is None else piece.block, (None, 0))
            key = _BlockKey(template, place, piece.phase, turns[piece[1:]])
            turns[piece[1:]] += 1
            parts.append(_Part(key, piece.start, end, [piece]))
            if piece.phase == "state":
                for entry in record.entries[piece.start : end]:
                    held[entry.kind, False] += entry.size
                    held[entry.kind, True] += entry.size * key.num_copies
        super().__init__(record, parts)
        # trained parameters have an optimizer's state, unless the optimizer has no state
        kind = "optimizer" if held["optimizer", False] else "weights"
        self._growth = held[kind, True] / max(1, held[kind, False])
        """Factor for the update, whose operators take all trained parameters at once."""

    def run(self) -> Record:
        for part in self._parts:
            self._check_neighbour(part)
        for part, copy in self._order():
            [piece], template = part.pieces, part.key.template
            block = piece.block
            if template is not None and block is not None:
                block += template.period * copy
            self._pieces.append(Piece(len(self._out), piece.phase, block))
            for index in range(part.start, part.end):
                grows = piece.phase == "update" and self._entries[index].what != "message"
                self._copy(index, copy, growth=self._growth if grows else 1.0)
        return self._finish()

    def _order(self) -> Iterator[tuple[_Part, int]]:
        """Yield the parts of all blocks: copies follow in forward and precede in backward."""
        parts = deque(self._parts)
        while parts:
            key: _BlockKey = parts[0].key
            if key.template is None or key.num_copies == 1:
                yield parts.popleft(), 0
                continue
            template, is_backward = key.template, key.phase == "backward"
            group = [parts.popleft() for _ in range(min(template.period, len(parts)))]
            places = list(range(template.first, template.first + template.period))
            copies = list(range(key.num_copies))
            if is_backward:
                places.reverse()
                copies.reverse()
            if [part.key for part in group] != [key._replace(place=place) for place in places]:
                raise CannotCopyError(f"the blocks of a template do not follow one another: {key}")
            yield from ((part, copy) for copy in copies for part in group)

    def _births(self, index: int, copy: int | None) -> Sequence[tuple[int, int | None]]:
        born = self._entries[index].born
        here, part = self._part_of[index].key, self._part_of[born]
        there, template = part.key, part.key.template
        distance = there.place - here.place
        if template is None or here.template is not template or abs(distance) > NEAR:
            if copy:
                raise CannotCopyError(f"each copy frees one storage: {self._entries[index]}")
            is_other = here.template is not None and here.template is not template
            return [(born, c) for c in range(1 if is_other else there.num_copies)]
        found, of_copy = template.at(template.position(here.place, copy or 0) + distance)
        target = self._part_at[there._replace(place=found)]
        return [(target.start + born - part.start, of_copy)]

    def _check_neighbour(self, part: _Part) -> None:
        key: _BlockKey = part.key
        if key.template is None or not key.template.has(key.place):
            return
        other = self._part_at.get(key._replace(place=key.place + key.template.period))
        if other is None or self._work(part) != self._work(other):
            raise CannotCopyError(f"blocks are not alike in their {key.phase}")

    def _work(self, part: _Part) -> list[tuple[object, ...]]:
        return [entry[:3] for entry in self._entries[part.start : part.end]]


# --- microbatches --------------------------------------------------------------------------------

HEAD = 1
"""If a schedule splits backward: number of first microbatches that are never copied. The first one
creates the gradients, and the later ones add to them."""


@dataclass(frozen=True, kw_only=True)
class FewMicrobatches:
    """A pipeline that runs a few microbatches of its table."""

    pipeline: PipelineLayout
    """With the shorter table."""
    all_actions: Sequence[str]
    """Actions of the rank in one pass through the full table, by torch's names."""
    run_actions: Sequence[str]
    """The same for the shorter table."""
    run: Sequence[int]
    """Number in the full table of each microbatch of the shorter one."""
    copies: Mapping[int, range]
    """Microbatches that each template represents, itself the first."""

    def template_of(self, number: int) -> int:
        """Return the microbatch that ran for this one."""
        return next((t for t, copied in self.copies.items() if number in copied), number)


def skip_microbatches(pipeline: PipelineLayout, *, rank: int) -> FewMicrobatches | None:
    """Return the pipeline with few microbatches for one of its ranks, or None if it needs all."""
    table = pipeline.table
    works = _works(table[rank])
    head = any(action.kind == "backward_weight" for action in table[rank]) * HEAD
    copies = {}
    for _, group in groupby(range(len(works)), lambda number: works[number]):
        alike = list(group)
        if len(alike) > head + 2:
            copies[alike[head]] = range(alike[head], alike[-1])
    skipped = {number for copied in copies.values() for number in copied[1:]}
    run = [number for number in range(len(works)) if number not in skipped]
    new = {number: index for index, number in enumerate(run)}
    shorter = [
        [replace(a, microbatch=new[a.microbatch]) for a in row if a.microbatch in new]
        for row in table
    ]
    few = replace(pipeline, table=shorter)
    if not copies or _works(shorter[rank]) != {new[number]: works[number] for number in run}:
        return None
    if (few.losses_in_flight > 1) != (pipeline.losses_in_flight > 1):
        return None  # the loss would be computed in another way
    return FewMicrobatches(
        pipeline=few,
        all_actions=[str(action) for action in lower(table)[rank]],
        run_actions=[str(action) for action in lower(shorter)[rank]],
        run=run,
        copies=copies,
    )


def _works(row: Sequence[Action]) -> dict[int, set[tuple[int, Kind, Kind | None]]]:
    """Return the work of a rank by microbatch: stages, kinds, and the kind before each, among the
    forwards or the backwards of its stage. A half of backward depends on the half before it."""
    last: dict[tuple[int, bool], Kind] = {}
    works: defaultdict[int, set[tuple[int, Kind, Kind | None]]] = defaultdict(set)
    for action in row:
        key = action.stage, action.kind == "forward"
        works[action.microbatch].add((action.stage, action.kind, last.get(key)))
        last[key] = action.kind
    return works


class _ActionKey(NamedTuple):
    """An action: the pass through the table, stage and kind, and the microbatch if it has one.
    Without stage and kind: the entries before a pass."""

    turn: int
    work: str
    microbatch: int | None


def copy_microbatches(record: Record, few: FewMicrobatches) -> Record:
    """Return the record of all microbatches.

    Raises:
        CannotCopyError: The microbatches do not do the same.
    """
    return _MicrobatchCopier(record, few).run()


class _MicrobatchCopier(_Copier):
    def __init__(self, record: Record, few: FewMicrobatches) -> None:
        super().__init__(record, _cut_actions(record, few))
        self._few = few
        self._number_of = {part.key: number for number, part in enumerate(self._parts)}
        self._done: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        """Microbatches written so far, by pass, stage and kind."""
        self._pieces = list(record.pieces[:1])

    def run(self) -> Record:
        for part in self._parts:
            self._check_neighbour(part)
        for part, number in self._order():
            marks = deque(part.pieces)
            for index in range(part.start, part.end):
                while marks and marks[0].start <= index:
                    self._mark(marks.popleft())
                self._copy(index, number)
            for mark in marks:
                self._mark(mark)
            if number is not None:
                self._done[part.key[:2]].append(number)
        return self._finish()

    def _mark(self, piece: Piece) -> None:
        if self._pieces[-1][1:] != piece[1:]:
            self._pieces.append(piece._replace(start=len(self._out)))

    def _order(self) -> Iterator[tuple[_Part, int | None]]:
        """Yield the parts of the full table, each with its microbatch."""
        for part in self._parts:
            key: _ActionKey = part.key
            if key.work:
                continue
            yield part, None
            if _ActionKey(key.turn + 1, "", None) not in self._part_at:
                return
            for name in self._few.all_actions:
                work, number = _read(name)
                run = None if number is None else self._few.template_of(number)
                yield self._part_at[_ActionKey(key.turn, work, run)], number

    def _births(self, index: int, copy: int | None) -> Sequence[tuple[int, int | None]]:
        born = self._entries[index].born
        here: _ActionKey = self._part_of[index].key
        part = self._part_of[born]
        there: _ActionKey = part.key
        if copy is None:
            if there.microbatch is None:
                return [(born, None)]
            copies = self._few.copies.get(there.microbatch, (there.microbatch,))
            return [(born, number) for number in copies]
        if there.microbatch is None:  # one of a row of buffers, one per microbatch
            return [(born + copy - self._run_index(here), None)]
        if here.microbatch != there.microbatch:
            done, ago = self._done[there[:2]], self._actions_ago(there, here)
            if ago > len(done):
                raise CannotCopyError(f"no earlier action for {self._entries[index]}")
            copy = done[-ago]
        target = self._part_at.get(there._replace(microbatch=self._few.template_of(copy)))
        if target is None:
            raise CannotCopyError(f"no such action ran: {there}")
        return [(target.start + born - part.start, copy)]

    def _run_index(self, key: _ActionKey) -> int:
        assert key.microbatch is not None
        return self._few.run.index(key.microbatch)

    def _actions_ago(self, there: _ActionKey, here: _ActionKey) -> int:
        """Return the number of actions of one stage and kind from `there`, included, to `here`."""
        between = range(self._number_of[there], self._number_of[here])
        return sum(self._parts[number].key[:2] == there[:2] for number in between)

    def _check_neighbour(self, part: _Part) -> None:
        number = part.key.microbatch
        if number is None or number not in self._few.copies:
            return
        next_one = self._few.copies[number].stop
        other = self._part_at[part.key._replace(microbatch=next_one)]
        if self._work(part) != self._work(other):
            raise CannotCopyError(f"microbatches are not alike in {part.key}")

    def _work(self, part: _Part) -> list[object]:
        """Return what an action does, without its microbatch."""
        pieces = [(piece.start - part.start, *piece[1:]) for piece in part.pieces]
        return [pieces, *(self._event(index) for index in range(part.start, part.end))]

    def _event(self, index: int) -> object:
        entry = self._entries[index]
        if entry.what != "death":
            return entry
        here, part = self._part_of[index].key, self._part_of[entry.born]
        there, offset = part.key, entry.born - part.start
        if there.microbatch is None:
            return entry[:-1], there, offset - self._run_index(here)
        is_own = here.microbatch == there.microbatch
        return entry[:-1], there[:2], offset, 0 if is_own else self._actions_ago(there, here)


def _cut_actions(record: Record, few: FewMicrobatches) -> Iterator[_Part]:
    """Yield the actions of a record, and the entries before and after each pass of the table."""
    names = [action.name for action in record.actions if action.name]
    num_turns, rest = divmod(len(names), len(few.run_actions))
    if rest or names != [*few.run_actions] * num_turns:
        raise CannotCopyError("the actions that ran are not those of the table")
    ends = [action.start for action in record.actions[1:]] + [len(record.entries)]
    seen = 0
    for action, end in zip(record.actions, ends, strict=True):
        turn, in_turn = divmod(seen, len(few.run_actions))
        if action.name:
            work, number = _read(action.name)
            key = _ActionKey(turn, work, None if number is None else few.run[number])
            seen += 1
        elif in_turn == 0:
            key = _ActionKey(turn, "", None)
        elif end > action.start:
            raise CannotCopyError("the record has entries between two actions of a pass")
        else:
            continue
        yield _Part(key, action.start, end, action.pieces)


def _read(name: str) -> tuple[str, int | None]:
    """Return stage and kind of one of torch's actions, and its microbatch if it has one."""
    work = name.rstrip(digits)
    number = name.removeprefix(work)
    return work, int(number) if number else None
