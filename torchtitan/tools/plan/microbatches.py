"""Rehearse a few microbatches of a pipeline, and repeat their record for the rest.

A stage does for a microbatch what it did for the one before. So the first microbatch of a kind is
the *template* of the rest, the second one if backward is split: its entries are appended to the
tape where the schedule computes them, and what the template allocated in forward and freed in
backward is born and dies again. All else runs in full: the schedule with its messages and the
buffers for them, gathers of weights, and reductions.

A template must free all that it allocates except its results, and nothing else. Otherwise all
microbatches have to run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtitan.models.init import local_part
from torchtitan.parallel.pipeline.schedules import Action, Kind, Stage
from torchtitan.tools.plan.copies import CannotCopyError
from torchtitan.tools.plan.tape import Piece, Tape
from torchtitan.tools.plan.world import replaced

HEAD = 1
"""If a schedule splits backward: number of microbatches of a kind that run before the template. The
gradients of the first one become those to which later ones are added."""


@contextmanager
def repeat_microbatches(tape: Tape, row: Sequence[Action]) -> Iterator[None]:
    """Run a few microbatches of a rank's row of the table, and repeat their record for the rest;
    raise CannotCopyError if a template keeps or frees more than its own storages."""
    repeater = _Repeater(tape, row)
    plain_forward = Stage.forward_maybe_with_nosync
    plain_backward = Stage.backward_maybe_with_nosync

    def forward(stage: Stage, *args: Any, **kwargs: Any) -> Any:
        [out] = repeater.run(stage, lambda: [plain_forward(stage, *args, **kwargs)])
        return out

    def backward(stage: Stage, part: str, values: Any, **kwargs: Any) -> Any:
        groups = None

        def compute() -> Sequence[Tensor | None]:
            nonlocal groups
            gradients, groups = plain_backward(stage, part, values, **kwargs)
            return () if part == "weight" else gradients

        gradients = tuple(repeater.run(stage, compute))
        if part == "input":  # torch leaves them there too
            for leaf, gradient in zip(values["input_values"], gradients, strict=False):
                if gradient is not None and leaf.grad is None:
                    leaf.grad = gradient
        return gradients, groups

    with (
        replaced(Stage, "forward_maybe_with_nosync", forward),
        replaced(Stage, "backward_maybe_with_nosync", backward),
    ):
        yield
    if repeater.mistake is not None:
        raise CannotCopyError(repeater.mistake)


def find_templates(row: Sequence[Action]) -> Mapping[Action, Action]:
    """Return the action that each repeated action of a row is like."""
    index_of = {action: number for number, action in enumerate(row)}
    head = any(action.kind == "backward_weight" for action in row) * HEAD
    works = sorted(_works(row).items())
    pairs_of: dict[Action, Action] = {}
    for _, alike in groupby(works, key=lambda work: (work[0][0], work[1][1])):
        group = [own for _, (own, _) in alike]
        for own in group[head + 1 :]:
            pairs = dict(zip(own, group[head], strict=True))
            if all(index_of[template] < index_of[action] for action, template in pairs.items()):
                pairs_of |= pairs
    return pairs_of


def _works(row: Sequence[Action]) -> Mapping[tuple[int, int], tuple[list[Action], list[object]]]:
    """Return the actions of each stage and microbatch, and the kind of each and of the one before
    among forwards or backwards of the stage. What a backward does depends on the one before."""
    groups: defaultdict[tuple[int, int], tuple[list[Action], list[object]]]
    groups = defaultdict(lambda: ([], []))
    last: dict[tuple[int, bool], Kind] = {}
    for action in row:
        key = action.stage, action.kind == "forward"
        own, kinds = groups[action.stage, action.microbatch]
        own.append(action)
        kinds.append((action.kind, last.get(key)))
        last[key] = action.kind
    return groups


class _Result(NamedTuple):
    """A tensor that an action returned."""

    born: int
    shape: torch.Size
    dtype: torch.dtype


class _Work(NamedTuple):
    """The entries of an action that ran."""

    start: int
    end: int
    pieces: Sequence[Piece]
    """Those that start in it."""
    results: Sequence[_Result | None]
    gradients: Mapping[int, int]
    """Birth of each new gradient of a parameter, and the parameter's number in its stage."""


class _Repeater:
    """Computes the actions of a row, in order."""

    def __init__(self, tape: Tape, row: Sequence[Action]) -> None:
        self.mistake: str | None = None
        """Why a template cannot be repeated. Raised late: torch would log the full schedule."""
        self._tape = tape
        # the first stage has no gradient of an input
        self._row = cycle(a for a in row if a.stage or a.kind != "backward_input")
        self._templates = find_templates(row)
        self._works: dict[Action, _Work] = {}
        self._held: defaultdict[tuple[int, int], dict[int, torch.UntypedStorage]]
        self._held = defaultdict(dict)
        """Storages of each repeated stage and microbatch, by the template's birth."""
        self._gradients: dict[int, int] = {}
        """All new gradients of actions that ran, as in `_Work`."""

    def run(
        self, stage: Stage, compute: Callable[[], Sequence[Tensor | None]]
    ) -> Sequence[Tensor | None]:
        """Compute the next action, or repeat its template."""
        action, record = next(self._row), self._tape.record
        assert action.stage == stage.stage_index
        parameters = list(stage.submod.parameters())
        if action in self._templates:
            return self._repeat(action, self._works[self._templates[action]], parameters)
        start, num = len(record.entries), len(record.pieces)
        results = compute()
        self._works[action] = _Work(
            start,
            len(record.entries),
            record.pieces[num:],
            [self._describe(result, start=start) for result in results],
            self._new_gradients(parameters, start=start),
        )
        self._gradients |= self._works[action].gradients
        return results

    def _describe(self, result: Any, *, start: int) -> _Result | None:
        born = self._tape.birth(result) if isinstance(result, Tensor) else -1
        return _Result(born, result.shape, result.dtype) if born >= start else None

    def _new_gradients(self, parameters: Sequence[nn.Parameter], *, start: int) -> dict[int, int]:
        births = {
            self._tape.birth(local_part(p.grad)): number
            for number, p in enumerate(parameters)
            if p.grad is not None
        }
        return {born: number for born, number in births.items() if born >= start}

    def _repeat(
        self, action: Action, work: _Work, parameters: Sequence[nn.Parameter]
    ) -> Sequence[Tensor | None]:
        tape, entries = self._tape, self._tape.record.entries
        with tape.within(is_paused=True):
            results = [r and torch.empty(r.shape, dtype=r.dtype) for r in work.results]
            for number in work.gradients.values():
                parameters[number].grad = torch.empty_like(parameters[number])
        returned = {
            expected.born: result.untyped_storage()
            for expected, result in zip(work.results, results, strict=True)
            if expected is not None and result is not None
        }
        for born, number in work.gradients.items():
            returned[born] = local_part(parameters[number].grad).untyped_storage()
        held, pieces = self._held[action.stage, action.microbatch], deque(work.pieces)
        for index in range(work.start, work.end):
            while pieces and pieces[0].start <= index:
                tape.mark(*pieces.popleft()[1:])
            entry = entries[index]
            if entry.what == "birth":
                if index not in returned:  # no variable may keep it
                    held[index] = torch.UntypedStorage(0, device="meta")
                tape.bear((returned if index in returned else held)[index], entry)
            elif entry.what != "death":
                entries.append(entry)
            elif entry.born in self._gradients:
                parameters[self._gradients[entry.born]].grad = None
            elif held.pop(entry.born, None) is None:
                self.mistake = f"microbatches free storages of others: {action} {entry}"
        for piece in pieces:
            tape.mark(*piece[1:])
        if action.kind in ("backward", "backward_weight"):
            kept = self._held.pop((action.stage, action.microbatch))
            if kept:
                self.mistake = f"microbatches keep storages: {action} {entries[next(iter(kept))]}"
        return results
