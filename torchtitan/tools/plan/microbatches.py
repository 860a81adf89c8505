"""Put microbatches that were left out of a rehearsal back into its record.

A pipeline rank does the same for each microbatch once its first ones are through: an *action* of
the schedule's table (a forward, half a backward, a message) differs between microbatches in nothing
but what it frees. So a few microbatches of the table are run, and the actions of one, the
*template*, are copied for those left out, in the order of the whole table. All microbatches are
given to the step, so that what belongs to none, such as buffers for what is received, is there.

A copied death ends the birth in the copy of the same microbatch, or in an action as many back as in
what was run. What is freed between actions is freed for each copy. That a template does what the
next microbatch does is checked, and that copies leave nothing behind; if they do, all must be run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from string import digits
from typing import NamedTuple

from torchtitan.parallel.pipeline.layout import PipelineLayout
from torchtitan.parallel.pipeline.schedules import Action, Kind, lower
from torchtitan.tools.plan.tape import Entry, Piece, Record
from torchtitan.tools.plan.unroll import CannotUnrollError

HEAD = 1
"""Where the gradients of inputs and weights are computed apart: microbatches that may differ from
those behind though they do the same, for the second one finds nothing to add gradients to."""


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """A pipeline that runs a few microbatches of its table."""

    pipeline: PipelineLayout
    """With the table that is run."""
    whole: Sequence[str]
    """What the rank does in a pass through the whole table, as torch names it."""
    few: Sequence[str]
    """The same of the table that is run."""
    run: Sequence[int]
    """By microbatch of that table: its number in the whole."""
    copies: Mapping[int, range]
    """By template: the microbatches that it stands for, itself the first."""

    def stands_for(self, number: int) -> int:
        """Return the microbatch that was run for this one."""
        return next((t for t, of in self.copies.items() if number in of), number)


def leave_out(pipeline: PipelineLayout, *, rank: int) -> Sparse | None:
    """Return the pipeline with few microbatches for one of its ranks; None: it needs all."""
    table = pipeline.table
    works = _works(table[rank])
    head = any(action.kind == "backward_weight" for action in table[rank]) * HEAD
    copies = {}
    for _, group in groupby(range(len(works)), lambda number: works[number]):
        alike = list(group)
        if len(alike) > head + 2:
            copies[alike[head]] = range(alike[head], alike[-1])
    gone = {number for of in copies.values() for number in of[1:]}
    run = [number for number in range(len(works)) if number not in gone]
    new = {number: index for index, number in enumerate(run)}
    fewer = [
        [replace(a, microbatch=new[a.microbatch]) for a in row if a.microbatch in new]
        for row in table
    ]
    few = replace(pipeline, table=fewer)
    if not copies or _works(fewer[rank]) != {new[number]: works[number] for number in run}:
        return None
    if (few.losses_in_flight > 1) != (pipeline.losses_in_flight > 1):
        return None  # the loss would be computed in another way
    return Sparse(
        pipeline=few,
        whole=[str(action) for action in lower(table)[rank]],
        few=[str(action) for action in lower(fewer)[rank]],
        run=run,
        copies=copies,
    )


def _works(row: Sequence[Action]) -> dict[int, set[tuple[int, Kind, Kind | None]]]:
    """Return what a rank does for each microbatch: stages, kinds, and what comes before each, of
    the forwards or the backwards of its stage. A gradient's first half finds what a second left."""
    last: dict[tuple[int, bool], Kind] = {}
    works: defaultdict[int, set[tuple[int, Kind, Kind | None]]] = defaultdict(set)
    for action in row:
        key = action.stage, action.kind == "forward"
        works[action.microbatch].add((action.stage, action.kind, last.get(key)))
        last[key] = action.kind
    return works


def unroll_microbatches(record: Record, sparse: Sparse) -> Record:
    """Return the record of all microbatches.

    Raises:
        CannotUnrollError: They are not alike in what they do.
    """
    return _Unroller(record, sparse).unroll()


class _Place(NamedTuple):
    """An action of the record: in which pass through the table, its stage and kind, and the
    microbatch, if it is of one. Without stage and kind: what comes before that pass."""

    turn: int
    work: str
    microbatch: int | None


@dataclass(frozen=True)
class _Part:
    """An action, or what comes before a pass or behind the last."""

    place: _Place
    start: int
    end: int
    pieces: Sequence[Piece]


class _Unroller:
    def __init__(self, record: Record, sparse: Sparse) -> None:
        self._entries, self._sparse = record.entries, sparse
        self._parts = list(_cut(record, sparse))
        self._part_at = {part.place: part for part in self._parts}
        self._part_of = [part for part in self._parts for _ in range(part.start, part.end)]
        self._order_of: dict[_Place, int] = {part.place: n for n, part in enumerate(self._parts)}
        self._done: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        """By pass, stage and kind: the microbatches of those in what comes out."""
        self._out: list[Entry] = []
        self._pieces = list(record.pieces[:1])
        self._born: dict[tuple[int, int | None], int] = {}
        """By entry and microbatch of a birth: its index in what comes out, while it lives."""

    def unroll(self) -> Record:
        self._check_likeness()
        for part, number in self._order():
            marks = deque(part.pieces)
            for index, of in self._steps(part, number):
                while marks and marks[0].start <= index:
                    self._mark(marks.popleft())
                self._emit(index, of)
            for mark in marks:
                self._mark(mark)
            if number is not None:
                self._done[part.place[:2]].append(number)
        freed = {entry.born for entry in self._entries if entry.what == "death"}
        left = [key for key in self._born if key[0] in freed]
        if left:
            entry = self._entries[left[0][0]]
            raise CannotUnrollError(f"{len(left)} copies are freed nowhere, the first {entry}")
        return Record(self._out, self._pieces)

    def _mark(self, piece: Piece) -> None:
        if self._pieces[-1][1:] != piece[1:]:
            self._pieces.append(piece._replace(start=len(self._out)))

    def _order(self) -> Iterator[tuple[_Part, int | None]]:
        """Yield parts, and the microbatch each is for, in the order of the whole step."""
        for part in self._parts:
            if part.place.work:
                continue
            yield part, None
            turn = part.place.turn
            if _Place(turn + 1, "", None) not in self._part_at:
                return
            for name in self._sparse.whole:
                work, number = _read(name)
                run = None if number is None else self._sparse.stands_for(number)
                yield self._part_at[_Place(turn, work, run)], number

    def _steps(self, part: _Part, number: int | None) -> Iterator[tuple[int, int | None]]:
        """Yield the entries of a part, and the microbatch each is for: between actions and in those
        of no microbatch, what is freed of a template is freed of each copy."""
        if number is not None:
            yield from ((index, number) for index in range(part.start, part.end))
            return
        seen: list[int] = []
        for of, group in groupby(range(part.start, part.end), self._freed_microbatch):
            copies = None if of is None else self._sparse.copies.get(of)
            if of is None or copies is None:
                yield from ((index, of) for index in group)
            else:
                indices = list(group)
                falls = any(other > of for other in seen)
                for copy in reversed(copies) if falls else copies:
                    yield from ((index, copy) for index in indices)
            if of is not None:
                seen.append(of)

    def _freed_microbatch(self, index: int) -> int | None:
        entry = self._entries[index]
        return self._part_of[entry.born].place.microbatch if entry.what == "death" else None

    def _emit(self, index: int, number: int | None) -> None:
        entry = self._entries[index]
        if entry.what == "birth":
            self._born[index, number] = len(self._out)
        elif entry.what == "death":
            born = self._born.pop(self._target(index, number), None)
            if born is None or self._out[born].size != entry.size:
                raise CannotUnrollError(f"nothing lives where {entry} frees it")
            entry = entry._replace(born=born)
        self._out.append(entry)

    def _target(self, index: int, number: int | None) -> tuple[int, int | None]:
        """Return the birth that a copy of a death ends, and which microbatch's."""
        born = self._entries[index].born
        here, there = self._part_of[index].place, self._part_of[born]
        if number is None:
            return born, None
        if there.place.microbatch is None:  # one of a row of buffers for each microbatch
            return born + number - self._sparse.run.index(here.microbatch), None
        if here.microbatch not in (None, there.place.microbatch):
            done, since = self._done[there.place[:2]], self._since(there.place, here)
            if since > len(done):
                raise CannotUnrollError(f"nothing was before that {self._entries[index]} frees")
            number = done[-since]
        place = there.place._replace(microbatch=self._sparse.stands_for(number))
        part = self._part_at.get(place)
        if part is None:
            raise CannotUnrollError(f"no such action has been run: {place}")
        return part.start + born - there.start, number

    def _since(self, there: _Place, here: _Place) -> int:
        """Return how many actions of a stage and kind have come since one of them, itself too."""
        behind = range(self._order_of[there], self._order_of[here])
        return sum(self._parts[n].place[:2] == there[:2] for n in behind)

    def _check_likeness(self) -> None:
        """Check that the microbatch behind a template does what it does."""
        for part in self._parts:
            number = part.place.microbatch
            if number is None or number not in self._sparse.copies:
                continue
            behind = self._sparse.copies[number].stop
            other = self._part_at[part.place._replace(microbatch=behind)]
            if self._codes(part) != self._codes(other):
                raise CannotUnrollError(f"microbatches are not alike in {part.place}")

    def _codes(self, part: _Part) -> list[object]:
        """Return what an action does, whatever its microbatch."""
        pieces = [(piece.start - part.start, *piece[1:]) for piece in part.pieces]
        return [pieces, *(self._code(index) for index in range(part.start, part.end))]

    def _code(self, index: int) -> object:
        entry = self._entries[index]
        if entry.what != "death":
            return entry
        here, there = self._part_of[index].place, self._part_of[entry.born]
        assert here.microbatch is not None
        offset = entry.born - there.start
        if there.place.microbatch is None:
            return entry[:-1], there.place, offset - self._sparse.run.index(here.microbatch)
        is_own = here.microbatch == there.place.microbatch
        since = 0 if is_own else self._since(there.place, here)
        return entry[:-1], there.place[:2], since, offset


def _cut(record: Record, sparse: Sparse) -> Iterator[_Part]:
    """Yield the actions of a record, and what is before and behind each pass through the table."""
    names = [action.name for action in record.actions if action.name]
    turns, rest = divmod(len(names), len(sparse.few))
    if rest or names != [*sparse.few] * turns:
        raise CannotUnrollError("the actions that were run are not those of the table")
    ends = [action.start for action in record.actions[1:]] + [len(record.entries)]
    seen = 0
    for action, end in zip(record.actions, ends, strict=True):
        turn, since = divmod(seen, len(sparse.few))
        if action.name:
            work, number = _read(action.name)
            place = _Place(turn, work, None if number is None else sparse.run[number])
            seen += 1
        elif since == 0:
            place = _Place(turn, "", None)
        elif end > action.start:
            raise CannotUnrollError("something happens between two actions of a pass")
        else:
            continue
        yield _Part(place, action.start, end, action.pieces)


def _read(name: str) -> tuple[str, int | None]:
    """Return stage and kind of an action of torch, and its microbatch if it is of one."""
    work = name.rstrip(digits)
    number = name.removeprefix(work)
    return work, int(number) if number else None
