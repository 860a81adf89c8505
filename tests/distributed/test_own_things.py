"""Things of the user's own on several ranks: a stream resumes, and callbacks do not part ranks.

The examples train in test_matrix.py and resume in test_resume.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_elastic import LOGGED, samples
from torchtitan.metrics.events import read_events

pytestmark = pytest.mark.slow


class Counted:
    """Samples one after another."""

    def __init__(self, **_: object) -> None:
        self.begin = self.next = 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> list[int]:
        self.next += 1
        return [(self.next * 7 + i) % 250 for i in range(33)]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.promise("streams")
def test_a_stream_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Where it is read is written down with each sample's number and hash."""
    data = (f"--training.dataset={__name__}:Counted", LOGGED)
    job, alone = (
        [*jobs.write_job(tmp_path, name=name), *data, "--training.steps=2"]
        for name in ("split", "alone")
    )
    ranks.run(jobs.train, [*job, "--training.steps=1"], world=2)
    ranks.run(jobs.train, job, world=1)
    ranks.run(jobs.train, alone, world=1)
    assert samples(tmp_path / "split") == samples(tmp_path / "alone")


STOPS = f'--training.callbacks={{path = "{__name__}:Parting", how = "stops"}}'


class Parting:
    """Does on rank 1 alone what would part the ranks."""

    def __init__(self, how: str = "") -> None:
        self.how = how

    def on_step(self, step: int, row: object) -> str | None:
        if dist.get_rank() == 0 or step < 2:
            return None
        if self.how == "stops":
            return "enough"
        raise OSError("the mail server is gone")

    def on_end(self, reason: str | None) -> None:
        if dist.get_rank() == 1 and self.how == "at the end":
            raise OSError("the mail server is gone")


@pytest.mark.promise("nobody-forks")
def test_an_error_of_a_callback_on_one_rank_ends_all(ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), f"--training.callbacks={__name__}:Parting"]
    for steps, last in ((5, 3), (2, 2)):
        messages = ranks.run(jobs.failure, [*job, f"--training.steps={steps}"], world=2)
        assert len({*messages}) == 1
        assert "the mail server is gone" in messages[0]
        assert "(on rank 1)" in messages[0]
        assert jobs.read_rows(tmp_path / "run")[-1]["step"] == last - (steps == 5)


@pytest.mark.promise("signals")
def test_a_callback_on_one_rank_stops_all_and_it_is_saved(ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), STOPS]
    first, _ = ranks.run(jobs.train, job, world=2)
    assert first.rows[-1]["step"] == 3
    assert (tmp_path / "run" / "checkpoint" / "step-3" / "manifest.json").is_file()
    assert "enough" in read_events(tmp_path / "run")[-1]["reason"]
