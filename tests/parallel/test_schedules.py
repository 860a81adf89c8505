"""Pipeline tables against torch: its constructors' refusals, its placements, its CSV files."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from torchtitan.base.errors import ConfigError
from torchtitan.parallel.pipeline.schedules import (
    SCHEDULES,
    check_schedule,
    compute_table,
    forward_table,
    lower,
    ranks_of,
)

MULTI = [name for name, facts in SCHEDULES.items() if facts.multi_stage]


def torchs_own(name: str, *, pp: int, stages_per_rank: int, num_microbatches: int) -> Any:
    stage = SimpleNamespace(
        group_rank=0, group_size=pp, num_stages=pp * stages_per_rank, submod=None
    )
    schedule_class = torch_schedules.get_schedule_class(name)
    single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
    return schedule_class(stage if single else [stage] * stages_per_rank, num_microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_refuses_exactly_what_torch_refuses(name: str) -> None:
    stages = (1, 2, 3) if SCHEDULES[name].multi_stage else (1,)
    for pp, stages_per_rank, num in itertools.product(range(1, 5), stages, range(1, 12)):
        sizes = {"pp": pp, "stages_per_rank": stages_per_rank, "num_microbatches": num}
        try:
            torchs_own(name, **sizes)
        except ValueError:
            with pytest.raises(ConfigError):
                check_schedule(name, **sizes)
        else:
            check_schedule(name, **sizes)


@pytest.mark.promise("pp")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 2), (2, 4), (3, 6), (4, 8), (4, 16)])
def test_every_action_once_on_the_rank_of_its_stage(
    name: str, pp: int, num_microbatches: int
) -> None:
    per_rank = 2 if SCHEDULES[name].multi_stage else 1
    table = compute_table(name, pp=pp, stages_per_rank=per_rank, num_microbatches=num_microbatches)
    placement = ranks_of(table)
    style = SCHEDULES[name].placement
    assert dict(enumerate(placement)) == generate_stage_to_rank_mapping(pp, pp * per_rank, style)
    assert len({a for row in table for a in row}) == sum(map(len, table))
    for rank, row in enumerate(table):
        assert {placement[action.stage] for action in row} == {rank}
    for stage, microbatch in itertools.product(range(pp * per_rank), range(num_microbatches)):
        kinds = [
            action.kind
            for action in table[placement[stage]]
            if (action.stage, action.microbatch) == (stage, microbatch)
        ]
        assert kinds in (
            ["forward", "backward"],
            ["forward", "backward_input", "backward_weight"],
        )


@pytest.mark.promise("pp")
@pytest.mark.parametrize("stages_per_rank", [2, 3, 4, 6])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"])
def test_a_stage_is_gathered_once_and_reduced_once(name: str, stages_per_rank: int) -> None:
    """Before its work, and after; what is done in between is torch's, in torch's order."""
    training = compute_table(name, pp=2, stages_per_rank=stages_per_rank, num_microbatches=8)
    evaluating = forward_table(ranks_of(training), num_microbatches=8)
    for table, reduces in ((training, 1), (evaluating, 0)):
        for rank, row in lower(table).items():
            words = [str(action) for action in row]
            for stage in {action.stage for action in table[rank]}:
                own = [word for word in words if re.match(rf"{stage}(?!WAIT_SEND)\D", word)]
                computing = [word for word in own if re.fullmatch(rf"{stage}[FBIW]\d+", word)]
                assert computing == [str(a) for a in table[rank] if a.stage == stage]
                assert own[0] == f"{stage}UNSHARD"
                assert own[-1] == f"{stage}RESHARD"
                assert own.count(f"{stage}UNSHARD") == own.count(f"{stage}RESHARD") == 1
                assert own.count(f"{stage}REDUCE_GRAD") == reduces


@pytest.mark.promise("pp")
@pytest.mark.parametrize("name", MULTI)
def test_what_a_rank_of_two_stages_does_is_what_torch_has_it_do(name: str) -> None:
    table = compute_table(name, pp=2, stages_per_rank=2, num_microbatches=8)
    runtime = torchs_own(name, pp=2, stages_per_rank=2, num_microbatches=8)
    rows = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in row]
        for rank, row in enumerate(table)
    }
    runtime._prepare_schedule_with_comms(rows)
    assert lower(table) == runtime.pipeline_order_with_comms


def test_1f1b_as_it_is_drawn_in_every_paper() -> None:
    table = compute_table("1F1B", pp=3, stages_per_rank=1, num_microbatches=4)
    assert [" ".join(map(str, row)) for row in table] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
