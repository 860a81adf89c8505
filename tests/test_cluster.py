"""The launch files: what they start understands its arguments, and Slurm runs its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts import slurm_campaign

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "cluster"


@pytest.mark.skipif(
    bool(slurm_campaign.missing()) or os.getuid() != 0, reason="needs Slurm, and to be root"
)
def test_slurm_queues_a_job_again_that_was_asked_to_leave(tmp_path: Path) -> None:
    said = slurm_campaign.campaign(tmp_path, steps=12, faults=["the signal"])
    assert said.startswith("queued again 1 times, resumed from steps [")
