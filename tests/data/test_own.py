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
import torch

from tests.data.helpers import SEQ_LEN, check_resume, loader_of, rows, training
from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data.custom import CustomStream, build_custom
from torchtitan.data.dataset import build_samples
from torchtitan.data.loader import Loader, MapSamples
from torchtitan.data.settings import DataLoaderConfig
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

class Labelled(Indexed):
    def __getitem__(self, k):
        return {"tokens": sample(k)[:-1], "labels": [-100] * 15 + [3]}

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

class Documents(Indexed):
    def __getitem__(self, k):
        return {"tokens": sample(k)[:-1], "labels": sample(k)[1:], "document_lengths": [4, 12]}
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


def test_a_stream_begins_again(tmp_path: Path) -> None:
    data = build("Stream", tmp_path)
    first = [data[k]["tokens"][0].item() for k in range(25)]
    assert first == [7 * (k % 10) for k in range(25)]


def test_labels_and_documents_are_taken_as_given(tmp_path: Path) -> None:
    sample = build("Labelled", tmp_path)[2]
    assert sample["labels"].tolist() == [-100] * 15 + [3]
    assert set(sample) == {"tokens", "labels"}
    told = build("Documents", tmp_path, attn_mask_type="block_causal")[0]
    assert told["document_lengths"].tolist() == [4, 12]
    assert set(build("Documents", tmp_path)[0]) == {"tokens", "labels"}
    plain = build("Indexed", tmp_path)[0]
    assert plain["tokens"].dtype == plain["labels"].dtype == torch.int64
    assert torch.equal(plain["tokens"][1:], plain["labels"][:-1])
    assert len(plain["tokens"]) == SEQ_LEN


def test_what_is_held_out_is_other_data(tmp_path: Path) -> None:
    one, other = (build("Indexed", tmp_path, held_out=held_out) for held_out in (False, True))
    assert one.fingerprint["data"] != other.fingerprint["data"]
    assert one[0]["tokens"].tolist() != other[0]["tokens"].tolist()


def test_a_dataset_gets_its_options(tmp_path: Path) -> None:
    plain, shifted = (
        build("Indexed", tmp_path, dataset_options=options) for options in ({}, {"first": 1})
    )
    assert plain.sources[0][1]["tokens"].tolist() == shifted.sources[0][0]["tokens"].tolist()  # type: ignore[attr-defined]


def test_no_documents_are_held_out_of_custom_data(tmp_path: Path) -> None:
    job = training(tmp_path / "cache", dataset="my_data:Indexed")
    with pytest.raises(DataError, match=r"validation\] holdout_fraction: .*my_data:Indexed"):
        build_samples(
            job, tokenizer=ByteTokenizer(), tokenizer_path="byte", seed=0, holdout_fraction=0.1
        )


def test_workers_read_it_too(tmp_path: Path) -> None:
    data = build("Indexed", tmp_path)
    alone, helped = loader_of(data), loader_of(data, num_workers=1)
    assert steps(alone, 3) == steps(helped, 3)
    helped.close()


INIT = "def __init__(self, **options)"
WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("", "Nothing", {}, "Nothing"),
    (f"class D:\n {INIT}: pass", "D", {}, "__iter__"),
    (f"class D:\n {INIT}: pass\n def __iter__(self): yield 1", "D", {}, "load_state_dict"),
    ("", "Indexed", {"dataset_options": {"fist": 1}}, "'fist'"),
    (f"class D:\n {INIT}: raise OSError('gone')", "D", {}, "OSError: gone"),
    ("class D(Indexed):\n def __len__(self): return 0", "D", {}, ""),
    ("", "Stream", {"num_epochs": 1}, ""),
    ("", "Stream", {"dataloader": DataLoaderConfig(num_workers=1)}, ""),
]


@pytest.mark.parametrize(("code", "name", "settings", "value"), WRONG)
def test_data_that_are_none(
    code: str, name: str, settings: dict[str, Any], value: str, tmp_path: Path, module: Path
) -> None:
    module.write_text(f"{MODULE}\n{code}\n")
    with pytest.raises(DataError) as error:
        build(name, tmp_path, **settings)
    assert "my_data" in str(error.value)
    assert value in str(error.value)
    assert error.value.key in ("dataset", "num_epochs", "dataloader.num_workers")


BAD_SAMPLES = {
    "[1, 2]": "(16,)",
    "[0.5] * 17": "torch.float32",
    "[1000] * 17": "1000",
    "[-1] * 17": "-1",
    "{'tokens': [1] * 16}": "'labels'",
    "{'tokens': [1] * 16, 'labels': [1] * 15}": "(15,)",
    "1 / 0": "ZeroDivisionError",
}


@pytest.mark.parametrize(("code", "value"), BAD_SAMPLES.items())
def test_a_sample_that_is_none(code: str, value: str, tmp_path: Path, module: Path) -> None:
    module.write_text(f"{MODULE}\nclass D(Indexed):\n def __getitem__(self, i): return {code}\n")
    with pytest.raises(DataError, match=naming("my_data:D", value)):
        build("D", tmp_path)[0]


def test_documents_must_be_told_where_they_are_kept_apart(tmp_path: Path) -> None:
    data = build("Labelled", tmp_path, attn_mask_type="block_causal")
    with pytest.raises(DataError, match="document_lengths"):
        data[0]


OTHERS = """
from torch.utils.data import IterableDataset
import torch
class Torchs(Stream, IterableDataset):
    pass
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
class Reused(Indexed):
    buffer = torch.zeros(17, dtype=torch.int64)
    def __getitem__(self, i):
        self.buffer[:] = torch.tensor(super().__getitem__(i))
        return self.buffer
"""


@pytest.fixture
def others(module: Path) -> ModuleType:
    module.write_text(MODULE + OTHERS)
    return import_module("my_data")


@pytest.mark.usefixtures("others")
def test_torchs_iterable_dataset_is_a_stream(tmp_path: Path) -> None:
    torchs, plain = (build(name, tmp_path) for name in ("Torchs", "Stream"))
    assert all(torch.equal(torchs[k]["tokens"], plain[k]["tokens"]) for k in range(3))


@pytest.mark.usefixtures("others")
def test_memory_that_is_filled_again_makes_other_samples(tmp_path: Path) -> None:
    reused, plain = (steps(loader_of(build(n, tmp_path)), 3) for n in ("Reused", "Indexed"))
    assert reused == plain


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
