"""`compare --bisect`: two faults and one clean layout; all of them in bisect_campaign.py."""

from __future__ import annotations

import pytest

from tests.tools.audit.bisect_campaign import JOB, check_clean, check_fault
from torchtitan.tools.compare import command as compare

pytestmark = [pytest.mark.usefixtures("warm_starts"), pytest.mark.long]


@pytest.mark.parametrize(
    "fault",
    [
        "tp: the stream's gradient is lost on the way",
        "cp: labels shifted by one at a shard's border",
    ],
)
def test_a_fault_is_found_at_its_place(fault: str) -> None:
    check_fault(fault)


def test_no_fault_is_found_where_there_is_none() -> None:
    assert float(check_clean("pp2", ())) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([JOB, "single", "fsdp"], "fsdp"),
        ([JOB, "single", "fsdp2", "--step=0"], "--step"),
        ([JOB, "single", "fsdp2", "--training.global_batch_size=-1"], "training.global_batch_size"),
        ([JOB, "single", "fsdp2", "--model.flavor=wide"], "flavor"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--bisect", *arguments]) == 2
    assert said in capsys.readouterr().err
