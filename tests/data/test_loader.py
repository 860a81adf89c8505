"""The loader: one order for every layout, one integer of state, one end for all ranks."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.data.helpers import SEQ_LEN, dataset_of, loader_of, rows
from tests.distributed.rank_pool import start_server
from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data.dataset import Dataset
from torchtitan.data.loader import Loader

Rows = list[tuple[int, ...]]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return dataset_of(tmp_path, num_epochs=1)


def in_order(dataset: Dataset, num: int) -> Rows:
    return [rows([{k: v[None] for k, v in dataset[i].items()}])[0] for i in range(num)]


def steps_of(loader: Loader) -> list[Rows]:
    steps = [rows(step) for step in loader]
    loader.close()
    return steps


@pytest.mark.promise("data-order")
def test_one_rank_gets_the_global_order(dataset: Dataset) -> None:
    loader = loader_of(dataset, batch=4, accumulation=3)
    step = next(loader)
    assert len(step) == 3
    assert step[0]["tokens"].shape == step[0]["labels"].shape == (4, SEQ_LEN)
    assert rows(step) + rows(next(loader)) == in_order(dataset, 24)


@pytest.mark.promise("data-order")
@pytest.mark.parametrize(
    ("degree", "batch", "accumulation"), [(2, 4, 1), (4, 2, 1), (1, 2, 4), (2, 1, 4), (8, 1, 1)]
)
def test_a_step_is_the_same_samples_in_every_layout(
    dataset: Dataset, degree: int, batch: int, accumulation: int
) -> None:
    whole = steps_of(loader_of(dataset, batch=8))
    ranks = [
        steps_of(
            loader_of(dataset, batch=batch, accumulation=accumulation, rank=rank, degree=degree)
        )
        for rank in range(degree)
    ]
    # every rank ends after the same step
    assert {len(steps) for steps in ranks} == {len(whole)}
    for number, step in enumerate(whole):
        share = [row for rank in ranks for row in rank[number]]
        assert len(share) == 8
        assert sorted(share) == sorted(step)


@pytest.mark.promise("data-order")
def test_microbatches_do_not_depend_on_the_degree(dataset: Dataset) -> None:
    """4 accumulated on one rank are the 2 + 2 of two ranks: sums over microbatches stay alike."""
    alone = next(loader_of(dataset, accumulation=4))
    pair = [next(loader_of(dataset, accumulation=2, rank=rank, degree=2)) for rank in range(2)]
    for number, batch in enumerate(alone):
        assert torch.equal(batch["tokens"], pair[number % 2][number // 2]["tokens"])


@pytest.mark.promise("mixtures")
def test_the_end_is_the_last_whole_global_batch(dataset: Dataset) -> None:
    assert dataset.num_samples is not None
    loader = loader_of(dataset, batch=10)
    assert len(list(loader)) == dataset.num_samples // 10
    assert loader.position == dataset.num_samples // 10 * 10
    with pytest.raises(StopIteration):
        next(loader)
    assert list(loader_of(dataset, batch=10**6)) == []
    whole = loader_of(dataset, batch=dataset.num_samples)
    assert len(list(whole)) == 1


@pytest.mark.promise("resume-elsewhere")
@pytest.mark.parametrize(("num_workers", "stop"), [(0, 0), (2, 5)])
def test_resume_continues_with_the_next_sample(
    dataset: Dataset, num_workers: int, stop: int
) -> None:
    everything = steps_of(loader_of(dataset, batch=3, accumulation=2))
    first = loader_of(dataset, batch=3, accumulation=2, num_workers=num_workers)
    before = [rows(next(first)) for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    assert state["position"] == first.position == stop * 6
    second = loader_of(dataset, batch=3, accumulation=2, num_workers=2 - num_workers)
    # also when reading has begun elsewhere
    next(second)
    second.load_state_dict(state)
    assert before + steps_of(second) == everything


@pytest.mark.promise("resume-elsewhere")
def test_resume_into_another_layout(dataset: Dataset) -> None:
    expected = in_order(dataset, 3 * 6 + 2 * 8)
    first = loader_of(dataset, batch=3, accumulation=2)
    seen = [row for _ in range(3) for row in rows(next(first))]
    state = first.state_dict()
    for rank in range(4):
        loader = loader_of(dataset, rank=rank, degree=4, position=999)
        loader.load_state_dict(state)
        seen += [row for _ in range(2) for row in rows(next(loader))]
    assert sorted(seen) == sorted(expected)
    assert rows(next(loader_of(dataset, position=18))) == expected[18:20]


@pytest.mark.promise("data-order")
def test_workers_change_nothing_and_end(dataset: Dataset) -> None:
    expected = steps_of(loader_of(dataset, batch=7, accumulation=2))
    loader = loader_of(
        dataset, batch=7, accumulation=2, num_workers=2, prefetch_factor=3, persistent_workers=True
    )
    others = set(multiprocessing.active_children())
    step = next(loader)
    assert len(set(multiprocessing.active_children()) - others) == 2
    # read-ahead is not consumed
    assert loader.position == 14
    assert [rows(step), *(rows(step) for step in loader)] == expected
    loader.close()
    assert set(multiprocessing.active_children()) == others


def read_and_be_killed(folder: Path, pipe: Connection) -> None:
    loader = loader_of(dataset_of(folder), num_workers=2)
    next(loader)
    pipe.send([child.pid for child in multiprocessing.active_children()])
    signal.pause()


def is_alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")  # Z is a process that ended unjoined
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"


@pytest.mark.slow
def test_workers_end_when_their_trainer_is_killed(tmp_path: Path) -> None:
    start_server()
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    trainer = context.Process(target=read_and_be_killed, args=(tmp_path, theirs))
    trainer.start()
    assert ours.poll(60)
    workers = ours.recv()
    assert len(workers) == 2
    trainer.kill()
    trainer.join()
    deadline = time.monotonic() + 30
    while any(is_alive(worker) for worker in workers):
        assert time.monotonic() < deadline, f"{workers} live on"
        time.sleep(0.1)


@pytest.mark.promise("other-data")
def test_other_data_is_refused(tmp_path: Path, dataset: Dataset) -> None:
    state = loader_of(dataset, position=7).state_dict()
    other = loader_of(dataset_of(tmp_path, seed=3, seq_len=8, num_epochs=1), position=5)
    with pytest.raises(DataError, match=naming("seq_len", 16, 8, "seed", 0, 3)):
        other.load_state_dict(state)
    assert other.position == 5
    del state["fingerprint"]["seed"]
    with pytest.raises(DataError, match=naming("seed", "none", 0)):
        loader_of(dataset).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_draws_no_random_numbers(dataset: Dataset, num_workers: int) -> None:
    before = torch.get_rng_state()
    loader = loader_of(dataset, num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(loader)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)
