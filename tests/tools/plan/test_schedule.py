"""Simulated pipelines against the closed formulas of the papers, and one worked by hand."""

from __future__ import annotations

import pytest

from torchtitan.parallel.pipeline.schedules import SCHEDULES, compute_table
from torchtitan.tools.plan.schedule import draw, peak_activations, simulate

# Idle over computing with F = I = W, p ranks, m microbatches, v stages a rank, and the peak of
# the fullest rank in all of its layers. GPipe: Huang et al. 2019; 1F1B and interleaved: Narayanan
# et al. 2021, where an interleaved rank holds p(1 + (p-1)/(pv)); zero bubble: Qi et al. 2024;
# DualPipe's pairs run one after the other here, each half sent at once, which costs no more.
FORMULAS = {
    "GPipe": (lambda p, m, v: (p - 1) / m, lambda p, m, v: m),
    "1F1B": (lambda p, m, v: (p - 1) / m, lambda p, m, v: p),
    "Interleaved1F1B": (lambda p, m, v: (p - 1) / (v * m), lambda p, m, v: p + (p - 1) / v),
    "LoopedBFS": (lambda p, m, v: (p - 1) / (v * m), lambda p, m, v: m),
    "InterleavedZeroBubble": (lambda p, m, v: (p - 1) / (6 * m), lambda p, m, v: p),
    "ZBVZeroBubble": (lambda p, m, v: (p - 1) / (6 * m), lambda p, m, v: p),
    "DualPipeV": (lambda p, m, v: (p - 1) / (6 * m), lambda p, m, v: p + 0.5),
}


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "num"), [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_closed_formulas(name: str, pp: int, num: int) -> None:
    bubble, peak = FORMULAS[name]
    any_number = name in ("Interleaved1F1B", "LoopedBFS")
    for stages in (1, 2, 3, 4) if any_number else [2 if SCHEDULES[name].multi_stage else 1]:
        table = compute_table(name, pp=pp, stages_per_rank=stages, num_microbatches=num)
        timeline = simulate(table)
        # durations are whole numbers, so only the division rounds
        assert timeline.bubble == pytest.approx(bubble(pp, num, stages), rel=1e-12)
        busy = {sum(span.end - span.start for span in row) for row in timeline.rows}
        assert busy == {3 * stages * num}  # so each rank has the same bubble
        peaks = peak_activations(table)
        assert max(peaks) == pytest.approx(stages * peak(pp, num, stages), rel=1e-12)
        if name == "1F1B":
            assert peaks == list(range(pp, 0, -1))


def test_two_ranks_by_hand() -> None:
    table = compute_table("1F1B", pp=2, stages_per_rank=1, num_microbatches=2)
    costs = {"forward": 2, "backward": 3, "backward_input": 1, "backward_weight": 1}
    timeline = simulate(table, costs=costs)
    assert draw(timeline, width=100).splitlines() == [
        "rank 0  F0--- F1--- .........B0------ ......B1------ ",
        "rank 1  ......F0--- B0------ F1--- B1------ .........",
    ]
    assert timeline.bubble == pytest.approx(2 * 15 / 20 - 1)
    # wide lines are broken: three slots of three characters behind the name of the rank
    assert draw(timeline, width=17).split("\n\n")[0].splitlines() == [
        "rank 0  F0--- F1-",
        "rank 1  ......F0-",
    ]
    table = compute_table("ZBVZeroBubble", pp=1, stages_per_rank=2, num_microbatches=1)
    assert draw(simulate(table), width=80) == "rank 0  F0 f0 i0 w0 I0 W0 "
