"""A rehearsal of few microbatches equals that of all of them, event for event."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import pipeline
from tests.tools.plan.jobs import placed, planned
from tests.tools.plan.test_unroll import FULL, TP2, layers
from torchtitan.parallel.pipeline.schedules import compute_table
from torchtitan.tools.plan import microbatches
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.copies import CannotCopyError
from torchtitan.tools.plan.microbatches import find_templates
from torchtitan.tools.plan.rehearse import rehearse, rehearse_step
from torchtitan.tools.plan.step import time_step
from torchtitan.tools.plan.traffic import count_traffic

IN_4 = "--training.local_batch_size=4"
IN_6 = "--training.local_batch_size=6"
IN_9 = "--training.local_batch_size=9"
TWICE = "--training.global_batch_size=8"
ALWAYS = "--parallelism.fsdp_reshard_after_forward=always"
EXPERTS = ("--model.name=deepseek_v3", "--model.flavor=tiny")

LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    # ranks, the one that is rehearsed, settings
    "Interleaved1F1B, uneven": (2, 0, (IN_4, layers(5), *pipeline("Interleaved1F1B"))),
    "ZBVZeroBubble": (2, 1, (IN_6, layers(4), *pipeline("ZBVZeroBubble"))),
    "1F1B, last, fsdp, tp, recomputed": (8, 4, (IN_4, layers(2), TP2, FULL, *pipeline("1F1B"))),
    "1F1B, accumulating": (2, 0, (IN_4, TWICE, *pipeline("1F1B"))),
    "ZBVZeroBubble, experts": (2, 1, (IN_6, *EXPERTS, layers(4), *pipeline("ZBVZeroBubble"))),
    "DualPipeV": (2, 0, (IN_9, layers(4), *pipeline("DualPipeV"))),
}
QUICK = list(LAYOUTS)[:2]


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS],
)
def test_repeated_equals_full(name: str, tmp_path: Path) -> None:
    world, rank, arguments = LAYOUTS[name]
    config, layout = placed(tmp_path, *arguments, world=world)
    assert layout.pipeline is not None
    assert find_templates(layout.pipeline.table[rank * layout.dims.pp // world])
    found = rehearse(config, layout=layout, rank=rank, repeats=True)
    full = rehearse(config, layout=layout, rank=rank)
    assert found.entries == full.entries
    assert found.pieces == full.pieces


def test_a_plan_is_that_of_a_full_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = planned(tmp_path, IN_9, layers(2), *pipeline("1F1B"), world=2)
    config, layout = job.shortened.config, job.shortened.layout
    found = [rehearse_step(config, layout=layout, rank=rank) for rank in range(2)]
    monkeypatch.setattr(microbatches, "find_templates", lambda _: {})
    full = [rehearse_step(config, layout=layout, rank=rank) for rank in range(2)]
    assert time_step(job, found) == time_step(job, full)
    for ours, right in zip(found, full, strict=True):
        assert replay(ours) == replay(right)
        assert count_traffic(job, ours, by_module=True) == count_traffic(job, right, by_module=True)


def test_a_microbatch_is_like_the_one_before_it() -> None:
    row = compute_table("1F1B", pp=2, stages_per_rank=1, num_microbatches=5)[0]
    found = {str(action): str(template) for action, template in find_templates(row).items()}
    # the first backward creates the gradients
    assert found == {f"0{kind}{number}": f"0{kind}1" for kind in "FB" for number in (2, 3, 4)}
    # backwards in descending order: the template's would be one of the last
    row = compute_table("LoopedBFS", pp=2, stages_per_rank=2, num_microbatches=5)[0]
    assert not find_templates(row)


def test_halves_that_take_turns_are_not_repeated() -> None:
    row = compute_table("InterleavedZeroBubble", pp=2, stages_per_rank=2, num_microbatches=8)[1]
    assert not any(action.microbatch in (3, 4) for action in find_templates(row))


def test_all_are_run_where_storages_outlive_a_microbatch(tmp_path: Path) -> None:
    """Weights that are freed after forward are gathered and freed in turns."""
    config, layout = placed(tmp_path, IN_4, layers(2), ALWAYS, *pipeline("1F1B"), world=4)
    with pytest.raises(CannotCopyError):
        rehearse(config, layout=layout, rank=2, repeats=True)
    full = rehearse(config, layout=layout, rank=2)
    assert rehearse_step(config, layout=layout, rank=2).entries == full.entries
