"""What a pipeline schedule costs: its table played through with a duration for each kind of work.

A rank takes up its actions in the order of the table, each once the rank is free and what it needs
has arrived. That alone gives start and end of everything, hence the time lost (the bubble) and the
activations held. Closed formulas exist for each schedule, but only under its own assumptions; the
play tells it for any table, any costs and any number of microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan.parallel.pipeline.schedules import Action, Kind, Table, execution_order


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long one stage takes for one microbatch, in any unit; the shares of one rank are equal.

    Defaults are the usual ones of papers: both halves of backward cost as much as forward.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """From one rank to another; it delays who waits for it, and occupies nobody."""

    def of(self, kind: Kind) -> float:
        """Return the duration of one action."""
        by_kind: Mapping[Kind, float] = {
            "forward": self.forward,
            "backward": self.backward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }
        return by_kind[kind]


@dataclass(frozen=True)
class Span:
    """An action and when it took place."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Who computed what, and when: simulated or measured. Time starts at 0."""

    rows: Sequence[Sequence[Span]]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(span.end for row in self.rows for span in row)

    def busy(self, rank: int) -> float:
        """Return the time that a rank computed."""
        return sum(span.end - span.start for span in self.rows[rank])

    def bubble(self, rank: int) -> float:
        """Return a rank's idle time as a fraction of its computing."""
        return self.makespan / self.busy(rank) - 1.0

    @property
    def total_bubble(self) -> float:
        """All ranks' idle time over all their computing: how much longer than ideal a step is."""
        busy = sum(self.busy(rank) for rank in range(len(self.rows)))
        return self.makespan * len(self.rows) / busy - 1.0

    def num_stages_of(self, rank: int) -> int:
        """Return how many stages a rank holds."""
        return len({span.action.stage for span in self.rows[rank]})

    def peak(self, rank: int) -> int:
        """Return the most activations held at once, each of one stage for one microbatch.

        One is held from the start of its forward to the end of its backward, the weights' half
        included. That is an upper bound: the inputs' half lets go of a part already.
        """
        held = most = 0
        for span in sorted(self.rows[rank], key=lambda span: span.start):
            held += span.action.kind == "forward"
            most = max(most, held)
            held -= span.action.kind in ("backward", "backward_weight")
        return most

    def peak_in_shares(self, rank: int) -> float:
        """Return `peak` in units of all the layers of a rank, to compare across schedules."""
        return self.peak(rank) / self.num_stages_of(rank)


def simulate(table: Table, *, costs: Costs) -> Timeline:
    """Play a table through and return when everything happens."""
    rank_of = {action.stage: rank for rank, row in enumerate(table) for action in row}
    rows: list[list[Span]] = [[] for _ in table]
    ends: dict[Action, float] = {}
    for rank, action, needs in execution_order(table):
        start = rows[rank][-1].end if rows[rank] else 0.0
        for need in needs:
            here = rank_of[need.stage] == rank
            start = max(start, ends[need] + (0.0 if here else costs.transfer))
        ends[action] = start + costs.of(action.kind)
        rows[rank].append(Span(action, start, ends[action]))
    assert len(ends) == sum(map(len, table)), "ranks wait in a circle; a table is checked when read"
    return Timeline(rows=rows)
