"""Data of the user's own: the same samples on any number of ranks, resumed at the next one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.data.helpers import check_resume, loader_of, rows, training
from torchtitan.base.errors import DataError
from torchtitan.data.custom import CustomStream, build_custom
from torchtitan.data.loader import Loader, MapSamples
from torchtitan.data.tokenizer import ByteTokenizer

MODULE = '''
import itertools

def sample(i):
    return [(i * 7 + j) % 250 for j in range(17)]

class Indexed:
    def __init__(self, *, seq_len, tokenizer, seed, held_out, first=0):
        assert seq_len == 16 and tokenizer.vocab_size > 255
        self.first = 1001 if held_out else first
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return sample(self.first + i)

class Stream:
    """10 samples and again."""
    def __init__(self, **options):
        self.next = self.begin = 0
    def __iter__(self):
        for self.next in range(self.begin, 10):
            self.next += 1
            yield sample(self.next - 1)
        self.begin = 0
    def state_dict(self):
        return {"next": self.next % 10}
    def load_state_dict(self, state):
        self.begin = self.next = state["next"]
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    path = tmp_path / "my_data.py"
    path.write_text(MODULE)
    yield path
    sys.modules.pop("my_data", None)


def build(name: str, tmp_path: Path, *, held_out: bool = False, **settings: Any) -> MapSamples:
    return build_custom(
        training(tmp_path / "cache", dataset=f"my_data:{name}", **settings),
        tokenizer=ByteTokenizer(),
        seed=3,
        held_out=held_out,
    )


def steps(loader: Loader, number: int) -> list[list[tuple[int, ...]]]:
    return [rows(next(loader)) for _ in range(number)]


@pytest.mark.promise("nobody-forks")
@pytest.mark.parametrize("name", ["Indexed", "Stream"])
def test_ranks_share_the_samples_of_one(name: str, tmp_path: Path) -> None:
    alone = steps(loader_of(build(name, tmp_path), batch=2, accumulation=2), 9)
    ranks = [
        steps(loader_of(build(name, tmp_path), batch=2, rank=rank, degree=2), 9)
        for rank in range(2)
    ]
    assert [one + other for one, other in zip(*ranks, strict=True)] == alone


@pytest.mark.promise("streams")
@pytest.mark.parametrize("name", ["Indexed", "Stream"])
def test_a_run_goes_on_with_the_next_sample_on_other_ranks(name: str, tmp_path: Path) -> None:
    straight = steps(loader_of(build(name, tmp_path), batch=4), 9)
    states = []
    for rank in range(2):
        first = loader_of(build(name, tmp_path), batch=2, rank=rank, degree=2)
        steps(first, 5)
        states.append(first.state_dict())
    assert states[0] == states[1]
    then = loader_of(build(name, tmp_path), batch=4)
    then.load_state_dict(states[0])
    assert steps(then, 4) == straight[5:]


def test_samples_by_number_are_shuffled_each_epoch_and_seen_once(tmp_path: Path) -> None:
    data = build("Indexed", tmp_path, num_epochs=2)
    assert data.num_samples == 48
    epochs = [[tuple(data[k]["tokens"].tolist()) for k in range(a, a + 24)] for a in (0, 24)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert len(set(epochs[0])) == 24


OTHERS = """
class Empty(Stream):
    def __iter__(self): return iter(())
class Odd(Stream):
    def state_dict(self): return {1: object()}
class Keyed(Stream):
    def state_dict(self): return {0: self.next % 10}
class Late(Stream):
    def __iter__(self):
        for i in range(self.begin, 10):
            yield sample(i)
            self.next = i + 1
        self.begin = 0
"""


@pytest.fixture
def others(module: Path) -> ModuleType:
    module.write_text(MODULE + OTHERS)
    return import_module("my_data")


@pytest.mark.promise("streams")
def test_streams_that_cannot_resume(tmp_path: Path, others: ModuleType) -> None:
    """No samples; states that are no JSON, or that JSON changes; one that counts after its yield,
    where its state is asked for before."""
    with pytest.raises(DataError, match="my_data:Empty"):
        build("Empty", tmp_path)[0]
    for name in ("Odd", "Keyed"):
        loader = loader_of(build(name, tmp_path))
        next(loader)
        with pytest.raises(DataError, match="JSON"):
            loader.state_dict()
    check_resume(others.Stream)
    with pytest.raises(AssertionError):
        check_resume(others.Late)


class CountsToThree:
    """A stream of three samples that keeps its place."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        while self.count < 3:
            self.count += 1
            yield self.count - 1
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Raw:
    """Reads a sample as it is."""

    def as_data_error(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, raw: int, *, number: int) -> int:
        return raw


@pytest.mark.promise("streams")
@pytest.mark.parametrize("position", range(8))
def test_a_stream_resumes_anywhere_also_at_the_end_of_a_pass(position: int) -> None:
    def stream() -> CustomStream:
        return CustomStream(CountsToThree(), Raw(), {})  # type: ignore[arg-type]

    through, saved, resumed = stream(), stream(), stream()
    samples = [through[k] for k in range(12)]
    assert samples == [0, 1, 2] * 4
    before = [saved[k] for k in range(position)]
    resumed.load_state(saved.state_at(position), position=position)
    assert [*before, *(resumed[k] for k in range(position, 12))] == samples


def test_a_state_that_lags_behind_its_samples_is_refused(tmp_path: Path, module: Path) -> None:
    """Its next sample after a resume would be the last one once more."""
    module.write_text(
        "class Lags:\n"
        "    def __init__(self, seq_len, **_):\n        self.length, self.n = seq_len + 1, 0\n"
        "    def __iter__(self):\n        while True:\n"
        "            yield [self.n % 9] * self.length\n            self.n += 1\n"
        "    def state_dict(self):\n        return {'n': self.n}\n"
        "    def load_state_dict(self, state):\n        self.n = state['n']\n"
    )
    first = loader_of(build("Lags", tmp_path), batch=2)
    steps(first, 2)
    then = loader_of(build("Lags", tmp_path), batch=2)
    then.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="state must change"):
        steps(then, 1)
