"""What ranks tell each other in a step, on one rank; test_faults has several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torchtitan.mesh.stop import StopRequest
from torchtitan.mesh.sync import StepSync

CPU = torch.device("cpu")


class Late(StopRequest):
    """Votes to stop once its deadline is over."""

    def votes(self) -> list[int]:
        return [0, int(self.is_late)]

    is_late = False


def test_flags_are_those_of_the_start_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives: list[list[int]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums: collectives.append(sums.tolist()))
    failed, stop = [False], Late()
    found = StepSync(stop, failures=[lambda: failed[0]], equal_ranks=2, device=CPU)
    assert found.sum_valid(torch.tensor(10)).item() == 5
    stop.is_late = failed[0] = True
    assert found.read_flags() == [False]
    assert found.stopped is None
    assert found.sum_valid(torch.tensor(4)).item() == 2
    assert found.read_flags() == [True]
    assert found.stopped is not None
    found.is_stopped()  # known already
    assert collectives == [[10, 0, 0, 0, 0], [4, 1, 0, 1, 0]]


def test_a_vote_after_a_save_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives: list[list[int]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda sums: collectives.append(sums.tolist()))
    stop = Late()
    found = StepSync(stop, failures=[], equal_ranks=1, device=CPU)
    found.is_stopped()
    assert found.stopped is None
    stop.is_late = True
    found.is_stopped()
    assert found.stopped is not None
    assert collectives == [[0, 0, 0], [0, 1, 0]]
