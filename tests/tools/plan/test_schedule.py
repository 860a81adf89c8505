"""Simulated pipelines against the closed formulas of the papers, and one worked by hand."""

from __future__ import annotations

import pytest

from torchtitan.parallel.pipeline.schedules import SCHEDULES, Action, compute_table
from torchtitan.tools.plan.schedule import Costs, Span, Timeline, simulate

SIZES = [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)]


def simulated(name: str, *, pp: int, num_microbatches: int, costs: Costs | None = None) -> Timeline:
    per_rank = 2 if SCHEDULES[name].multi_stage else 1
    table = compute_table(name, pp=pp, stages_per_rank=per_rank, num_microbatches=num_microbatches)
    return simulate(table, costs=costs or Costs())


# Idle over computing with F = I = W, p ranks, m microbatches, two stages a rank, and the peak of
# the fullest rank in all of its layers. GPipe: Huang et al. 2019; 1F1B and interleaved: Narayanan
# et al. 2021, where an interleaved rank holds p(1 + (p-1)/(pv)); zero bubble: Qi et al. 2024;
# DualPipe's pairs run one after the other here, each half sent at once, which costs no more.
FORMULAS = {
    "GPipe": (lambda p, m: (p - 1) / m, lambda p, m: m),
    "1F1B": (lambda p, m: (p - 1) / m, lambda p, m: p),
    "Interleaved1F1B": (lambda p, m: (p - 1) / (2 * m), lambda p, m: p + (p - 1) / 2),
    "LoopedBFS": (lambda p, m: (p - 1) / (2 * m), lambda p, m: m),
    "InterleavedZeroBubble": (lambda p, m: (p - 1) / (6 * m), lambda p, m: p),
    "ZBVZeroBubble": (lambda p, m: (p - 1) / (6 * m), lambda p, m: p),
    "DualPipeV": (lambda p, m: (p - 1) / (6 * m), lambda p, m: p + 0.5),
}


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "num"), SIZES)
def test_closed_formulas(name: str, pp: int, num: int) -> None:
    bubble, peak = FORMULAS[name]
    timeline = simulated(name, pp=pp, num_microbatches=num)
    # durations are whole numbers, so only the division rounds
    assert timeline.total_bubble == pytest.approx(bubble(pp, num), rel=1e-12)
    for rank in range(pp):
        assert timeline.bubble(rank) == pytest.approx(bubble(pp, num), rel=1e-12)
    assert max(timeline.peak_in_shares(rank) for rank in range(pp)) == peak(pp, num)
    if name == "1F1B":
        assert [timeline.peak(rank) for rank in range(pp)] == list(range(pp, 0, -1))


def test_two_ranks_by_hand() -> None:
    #  rank 0  F0 F1 . . . . B0 B0 . B1 B1      with a transfer of 1
    #  rank 1  . . F0 B0 B0 F1 B1 B1 . . .
    timeline = simulated("1F1B", pp=2, num_microbatches=2, costs=Costs(transfer=1.0))
    spans = {str(span.action): (span.start, span.end) for row in timeline.rows for span in row}
    assert spans == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (2, 3),
        "1B0": (3, 5),
        "1F1": (5, 6),
        "1B1": (6, 8),
        "0B0": (6, 8),
        "0B1": (9, 11),
    }
    assert timeline.makespan == 11
    assert timeline.busy(0) == 6
    assert timeline.bubble(0) == pytest.approx(5 / 6)


def test_costs_count_by_kind() -> None:
    costs = Costs(forward=2, backward=7, backward_input=4, backward_weight=3)
    one = simulated("GPipe", pp=1, num_microbatches=3, costs=costs)
    assert one.makespan == 3 * (2 + 7)
    assert one.total_bubble == 0
    split = simulated("InterleavedZeroBubble", pp=2, num_microbatches=4, costs=costs)
    assert split.busy(0) == 2 * 4 * (2 + 4 + 3)


def test_weights_half_holds_its_activations() -> None:
    kinds = ("forward", "backward_input", "forward", "backward_weight")
    row = [
        Span(Action(0, kind, index // 2), float(index), index + 1.0)
        for index, kind in enumerate(kinds)
    ]
    assert Timeline(rows=[row]).peak(0) == 2


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble(stages_per_rank: int) -> None:
    for name in ("Interleaved1F1B", "LoopedBFS"):
        table = compute_table(name, pp=4, stages_per_rank=stages_per_rank, num_microbatches=8)
        timeline = simulate(table, costs=Costs())
        assert timeline.total_bubble == pytest.approx(3 / (stages_per_rank * 8), rel=1e-12)
        peak = 8 if name == "LoopedBFS" else 4 + 3 / stages_per_rank
        assert timeline.peak_in_shares(0) == pytest.approx(peak)
