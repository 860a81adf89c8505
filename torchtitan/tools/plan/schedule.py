"""The cost of a pipeline schedule: its table simulated with a duration for each kind of action.

A rank executes its actions in the order of the table. Each starts when the rank is free and its
inputs have arrived. This gives the start and end of each action, hence the bubble and the held
activations. Closed formulas exist for each schedule, but only under its own assumptions; the
simulation works for any table, costs and number of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtitan.parallel.pipeline.schedules import Action, Kind, Table


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Duration of one stage's work on one microbatch, in any unit.

    As usual in papers, each half of backward costs the same as forward by default.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """Delay from one rank to another. No rank is busy during it."""

    def of(self, action_name: Kind) -> float:
        """Return the duration of one action."""
        by_kind: Mapping[Kind, float] = {
            "forward": self.forward,
            "backward": self.backward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }
        return by_kind[action_name]


@dataclass(frozen=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The actions of each rank, simulated or measured. Time starts at 0."""

    rows: Sequence[Sequence[Span]]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for row in self.rows for span in row)

    def busy(self, rank: int) -> float:
        """Return a rank's computing time."""
        return sum(span.end - span.start for span in self.rows[rank])

    def bubble(self, rank: int) -> float:
        """Return a rank's idle time as a fraction of its computing."""
        return self.makespan / self.busy(rank) - 1.0

    @property
    def total_bubble(self) -> float:
        """Idle time of all ranks as a fraction of their computing."""
        busy = sum(self.busy(rank) for rank in range(len(self.rows)))
        return self.makespan * len(self.rows) / busy - 1.0

    def num_stages_of(self, rank: int) -> int:
        """Return the number of stages of a rank."""
        return len({span.action.stage for span in self.rows[rank]})

    def peak(self, rank: int) -> int:
        """Return the most activations held at once, each of one stage and microbatch.

        An activation is held from the start of its forward to the end of its backward, with the
        half for weights. That is an upper bound, because the half for inputs frees a part.
        """
        held = most = 0
        for span in sorted(self.rows[rank], key=lambda span: span.start):
            held += span.action.kind == "forward"
            most = max(most, held)
            held -= span.action.kind in ("backward", "backward_weight")
        return most

    def peak_in_shares(self, rank: int) -> float:
        """Return `peak` divided by the stages of a rank, to compare schedules."""
        return self.peak(rank) / self.num_stages_of(rank)


def simulate(table: Table, *, costs: Costs) -> Timeline:
    """Return the start and end of each action of a table."""
    rank_of = {action.stage: rank for rank, row in enumerate(table) for action in row}
    rows: list[list[Span]] = [[] for _ in table]
    ends: dict[Action, float] = {}
    for rank, action, needs in execution_order(table):
        start = rows[rank][-1].end if rows[rank] else 0.0
        for need in needs:
            is_local = rank_of[need.stage] == rank
            start = max(start, ends[need] + (0.0 if is_local else costs.transfer))
        ends[action] = start + costs.of(action.kind)
        rows[rank].append(Span(action, start, ends[action]))
    assert len(ends) == sum(map(len, table)), "deadlock; tables are checked when they are read"
    return Timeline(rows=rows)


def execution_order(table: Table) -> Iterator[tuple[int, Action, list[Action]]]:
    """Yield rank, action and the actions that it depends on, each action after its dependencies.

    The iterator ends early if the ranks deadlock.
    """
    num_stages = 1 + max(action.stage for row in table for action in row)
    num_done = [0] * len(table)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            for action in row[num_done[rank] :]:
                needs = [
                    next((choice for choice in either if choice in done), None)
                    for either in _requirements(action, num_stages=num_stages)
                ]
                met = [need for need in needs if need is not None]
                if len(met) < len(needs):
                    break
                done.add(action)
                num_done[rank] += 1
                moved = True
                yield rank, action, met


def _requirements(action: Action, *, num_stages: int) -> list[tuple[Action, ...]]:
    """Return the dependencies of `action`, each as alternatives. One of them is in the table."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "forward":
        return [(Action(stage - 1, "forward", microbatch),)] if stage else []
    if action.kind == "backward_weight":
        return [(Action(stage, "backward_input", microbatch),)]
    needs: list[tuple[Action, ...]] = [(Action(stage, "forward", microbatch),)]
    if stage + 1 < num_stages:
        kinds: tuple[Kind, ...] = ("backward", "backward_input")
        needs.append(tuple(Action(stage + 1, action_name, microbatch) for action_name in kinds))
    return needs
