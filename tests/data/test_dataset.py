"""Samples: cut as the closed form says, every one once an epoch, and told apart by fingerprints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from examples.sample_log import hash_tokens
from tests.data.helpers import SEQ_LEN, dataset_of, training, write_texts
from torchtitan.data.dataset import Dataset
from torchtitan.data.documents import build_text
from torchtitan.data.tokenizer import build_tokenizer

TEXTS = {"a.txt": "the first document, ", "b.txt": "a second one, and ", "c.txt": "x" * 200}


def stream(texts: list[str]) -> list[int]:
    return [i for text in texts for i in [*text.encode(), 257]]


def sample(dataset: Dataset, k: int) -> tuple[int, ...]:
    item = dataset[k]
    assert torch.equal(item["tokens"][1:], item["labels"][:-1])
    assert item["tokens"].dtype == item["labels"].dtype == torch.int64
    return (*item["tokens"].tolist(), item["labels"][-1].item())


def cuts(tokens: list[int]) -> list[tuple[int, ...]]:
    """All samples of a token stream, in its own order."""
    starts = range(0, len(tokens) - SEQ_LEN, SEQ_LEN)
    return [tuple(tokens[start : start + SEQ_LEN + 1]) for start in starts]


@pytest.mark.promise("mixtures")
def test_samples_are_cut_across_documents(tmp_path: Path) -> None:
    paths = write_texts(tmp_path / "texts", TEXTS)
    dataset = dataset_of(tmp_path, dataset_path=paths, num_epochs=2)
    expected = cuts(stream(list(TEXTS.values())))
    assert dataset.num_samples == 2 * len(expected)
    first, second = (
        [sample(dataset, k) for k in range(epoch * len(expected), (epoch + 1) * len(expected))]
        for epoch in range(2)
    )
    assert Counter(first) == Counter(second) == Counter(expected)
    assert first != second
    assert first != expected


@pytest.mark.promise("mixtures")
@pytest.mark.parametrize("num_tokens", [SEQ_LEN + 1, 2 * SEQ_LEN, 2 * SEQ_LEN + 1])
def test_the_last_whole_sample_is_used(tmp_path: Path, num_tokens: int) -> None:
    paths = write_texts(tmp_path / "texts", {"a.txt": "x" * (num_tokens - 1)})
    dataset = dataset_of(tmp_path, dataset_path=paths, num_epochs=1)
    assert dataset.num_samples == len(cuts([0] * num_tokens))


@pytest.mark.promise("mixtures")
def test_order_does_not_depend_on_the_number_of_epochs(tmp_path: Path) -> None:
    datasets = [dataset_of(tmp_path, num_epochs=n) for n in (1, 5, None)]
    orders = [[hash_tokens(dataset[k]["tokens"]) for k in range(100)] for dataset in datasets]
    assert orders[0] == orders[1] == orders[2]
    assert datasets[2].num_samples is None
    datasets[2][10**9]


@pytest.mark.promise("mixtures")
def test_weights(tmp_path: Path) -> None:
    texts = {"a.txt": "a" * 999, "b.txt": "b" * 2999}
    paths = write_texts(tmp_path / "texts", texts)
    dataset = dataset_of(tmp_path, dataset_path=paths, dataset_weights=(0.75, 0.25), num_epochs=2)
    num_a, num_b = 999 // SEQ_LEN, 2999 // SEQ_LEN
    drawn = Counter(chr(sample(dataset, k)[0]) for k in range(400))
    assert drawn == {"a": 300, "b": 100}
    prints = [
        dataset_of(tmp_path, dataset_path=paths, dataset_weights=weights).fingerprint
        for weights in ((3.0, 1.0), (3.0, 2.0))
    ]
    assert prints[0] == dataset.fingerprint
    assert {key for key in prints[1] if prints[1][key] != prints[0][key]} == {"weights"}
    # the end is where the smaller source was seen twice
    assert dataset.num_samples is not None
    drawn = Counter(chr(sample(dataset, k)[0]) for k in range(dataset.num_samples))
    assert drawn["a"] == 2 * num_a
    assert drawn["b"] < num_b
    assert chr(sample(dataset, dataset.num_samples - 1)[0]) == "a"


@pytest.mark.promise("mixtures")
def test_sources_of_one_size_have_orders_of_their_own(tmp_path: Path) -> None:
    paths = write_texts(tmp_path / "texts", {"a.txt": "a" * 999, "b.txt": "b" * 999})
    dataset = dataset_of(tmp_path, dataset_path=paths, dataset_weights=(1.0, 1.0))
    places = [dataset.place_of(k) for k in range(2 * (999 // SEQ_LEN))]
    first, second = ([i for source, _, i in places if source == s] for s in range(2))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.promise("mixtures", "other-data")
def test_fingerprint_tells_what_changed(tmp_path: Path) -> None:
    def fingerprint(**settings: object) -> dict[str, str]:
        return dataset_of(tmp_path, **settings).fingerprint  # type: ignore[arg-type]

    base = fingerprint()
    for settings in ({}, {"num_epochs": 3}, {"dataset_weights": (2.0,)}):
        assert fingerprint(**settings) == base
    other = write_texts(tmp_path / "texts", {"other.txt": "y" * 999})
    for changed, settings in {
        "seq_len": {"seq_len": 8},
        "seed": {"seed": 1},
        "data": {"dataset_path": other},
    }.items():
        changes = fingerprint(**settings)
        assert [key for key in base if changes[key] != base[key]] == [changed]
    job = training(
        tmp_path / "cache", dataset="files", dataset_path=[str(tmp_path / "text" / "words.txt")]
    )
    changes = build_text(job, tokenizer=build_tokenizer("bpe_2048"), seed=0).fingerprint
    assert [key for key in base if changes[key] != base[key]] == ["data", "tokenizer"]
