"""What ranks ask of the file system does not grow with their number, and rank 0 asks for all."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool

EVENTS = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
Asked = Counter[tuple[str, str]]


def train_counted(arguments: list[str], folder: str) -> Asked:
    """Train, and count what Python asks for in `folder`: by event and path, the rank's own number
    left out."""
    counts: Asked = Counter()
    own, listens = f"__{dist.get_rank()}_", True

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if listens and event in EVENTS and isinstance(args[0], str | os.PathLike):
            path = os.fspath(args[0])
            if path.startswith(folder):
                counts[event, path.removeprefix(folder).replace(own, "__own_")] += 1

    sys.addaudithook(hear)  # it stays as long as the process
    try:
        jobs.train(arguments)
    finally:
        listens = False
    return counts


@pytest.fixture(scope="module")
def asked(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What each rank of 2 and of 4 asks for while it saves once, and while it resumes and saves."""
    found: dict[str, dict[int, list[Asked]]] = {"save": {}, "resume": {}}
    for world in (2, 4):
        place = tmp_path_factory.mktemp(f"{world}")
        job = [*jobs.write_job(place), "--checkpoint.verify_on_load=false"]
        folder = str(place / "run" / "checkpoint")
        for steps, what in enumerate(found, start=1):
            arguments = [*job, f"--training.steps={steps}"]
            found[what][world] = ranks.run(train_counted, arguments, folder, world=world)
    return found


def test_no_rank_asks_for_more_where_there_are_more(asked: dict[str, dict]) -> None:
    few, many = asked["save"][2], asked["save"][4]
    assert sum(few[0].values()) > 20
    assert few[0] == many[0]  # rank 0
    assert few[1] == many[1] == many[2] == many[3]


@pytest.mark.parametrize("what", ["save", "resume"])
def test_other_ranks_list_nothing_and_read_no_metadata(what: str, asked: dict[str, dict]) -> None:
    for counts in (c for world in (2, 4) for c in asked[what][world][1:]):
        assert not [path for event, path in counts if event in ("os.listdir", "os.scandir")]
        assert not [path for _, path in counts if path.endswith((".metadata", ".json"))]


def test_a_file_of_tensors_is_opened_once(asked: dict[str, dict]) -> None:
    for counts in asked["resume"][4]:
        opened = {path: n for (event, path), n in counts.items() if event == "open"}
        for component in ("model", "optimizer"):
            assert opened[f"/step-1/{component}/__own_0.distcp"] == 1
