"""One rank of each machine does what all ranks there need."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from tests.distributed.rank_pool import RankPool
from torchtitan.base.errors import CheckpointError, DataError, Violation
from torchtitan.mesh.ranks import OncePerMachine, on_every_rank, on_first_rank


def two_calls(machines: list[str], folder: Path) -> tuple[list[str], list[str]]:
    """Return what both calls return: each notes in `folder` that it was made, and by which rank."""
    once, machine = OncePerMachine(), machines[dist.get_rank()]

    def note(name: str) -> list[str]:
        (folder / f"{name} {dist.get_rank()}").touch()
        return [name, machine]

    with mock.patch("socket.gethostname", return_value=machine):
        return once(lambda: note("first")), once(lambda: note("second"))


def test_one_rank_of_each_machine_works(ranks: RankPool, tmp_path: Path) -> None:
    machines = ["a", "b", "b", "a"]  # ranks need not be dealt out in order
    found = ranks.run(two_calls, machines, tmp_path, world=4)
    assert found == [(["first", name], ["second", name]) for name in machines]
    made = [name.rsplit(" ", 1) for name in os.listdir(tmp_path)]
    assert sorted((call, machines[int(rank)]) for call, rank in made) == [
        ("first", "a"),
        ("first", "b"),
        ("second", "a"),
        ("second", "b"),
    ]


def said_of(kind: str) -> str:
    def fail() -> None:
        if kind == "setting":
            raise DataError.at("dataset_path", f"rank {dist.get_rank()} finds no file")
        raise ZeroDivisionError("a defect")

    try:
        OncePerMachine()(fail)
    except DataError as error:
        problem = error.within("training").problem
        return problem.keys[0] if isinstance(problem, Violation) else str(problem)
    except ZeroDivisionError:
        return "raised here"
    return "nothing"


def test_all_ranks_fail_with_the_one_that_works(ranks: RankPool) -> None:
    assert ranks.run(said_of, "setting", world=3) == ["training.dataset_path"] * 3
    found = ranks.run(said_of, "defect", world=3)
    assert sorted(found) == ["ZeroDivisionError: a defect"] * 2 + ["raised here"]


def errors_of_one_rank() -> list[str]:
    """Let one rank alone raise a user's mistake; return what this rank raises."""

    def fail() -> None:
        if dist.get_rank() == 0:
            raise DataError("row 3 is damaged")

    found = []
    for act in (on_first_rank, on_every_rank):
        try:
            act(fail, group=dist.group.WORLD)
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_an_error_of_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    for found in ranks.run(errors_of_one_rank, world=2, timeout=30):
        assert len(found) == 2
        assert all("row 3 is damaged" in message for message in found)
