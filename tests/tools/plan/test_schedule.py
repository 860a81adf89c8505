"""Simulated pipelines against the closed formulas of the papers, and one worked by hand."""

from __future__ import annotations

import pytest

from torchtitan.parallel.pipeline.schedules import SCHEDULES, compute_table
from torchtitan.tools.plan.schedule import draw, peak_activations, simulate

SIZES = [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)]


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
    stages = 2 if SCHEDULES[name].multi_stage else 1
    table = compute_table(name, pp=pp, stages_per_rank=stages, num_microbatches=num)
    timeline = simulate(table)
    # durations are whole numbers, so only the division rounds
    assert timeline.bubble == pytest.approx(bubble(pp, num), rel=1e-12)
    busy = {sum(span.end - span.start for span in row) for row in timeline.rows}
    assert busy == {3 * stages * num}  # so each rank has the same bubble
    peaks = peak_activations(table)
    assert max(peaks) == stages * peak(pp, num)
    if name == "1F1B":
        assert peaks == list(range(pp, 0, -1))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble(stages: int) -> None:
    for name in ("Interleaved1F1B", "LoopedBFS"):
        table = compute_table(name, pp=4, stages_per_rank=stages, num_microbatches=8)
        assert simulate(table).bubble == pytest.approx(3 / (stages * 8), rel=1e-12)
        assert peak_activations(table)[0] == (8 * stages if name == "LoopedBFS" else 4 * stages + 3)


def test_two_ranks_by_hand() -> None:
    #  rank 0  F0 F0 F1 F1 .  .  .  B0 B0 B0 .  .  B1 B1 B1
    #  rank 1  .  .  F0 F0 B0 B0 B0 F1 F1 B1 B1 B1 .  .  .
    table = compute_table("1F1B", pp=2, stages_per_rank=1, num_microbatches=2)
    costs = {"forward": 2, "backward": 3, "backward_input": 1, "backward_weight": 1}
    timeline = simulate(table, costs=costs)
    spans = {str(span.action): (span.start, span.end) for row in timeline.rows for span in row}
    assert spans == {
        "0F0": (0, 2),
        "0F1": (2, 4),
        "1F0": (2, 4),
        "1B0": (4, 7),
        "0B0": (7, 10),
        "1F1": (7, 9),
        "1B1": (9, 12),
        "0B1": (12, 15),
    }
    assert timeline.bubble == pytest.approx(2 * 15 / 20 - 1)


def test_drawing() -> None:
    timeline = simulate(compute_table("1F1B", pp=2, stages_per_rank=1, num_microbatches=2))
    assert draw(timeline, width=100).splitlines() == [
        "rank 0  F0 F1 ......B0--- ...B1--- ",
        "rank 1  ...F0 B0--- F1 B1--- ......",
    ]
    # wide lines are broken: three slots of three characters behind the name of the rank
    assert draw(timeline, width=17).split("\n\n")[0].splitlines() == [
        "rank 0  F0 F1 ...",
        "rank 1  ...F0 B0-",
    ]
    table = compute_table("ZBVZeroBubble", pp=1, stages_per_rank=2, num_microbatches=1)
    assert draw(simulate(table), width=80) == "rank 0  F0 f0 i0 w0 I0 W0 "
