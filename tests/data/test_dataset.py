"""Samples: cut as the closed form says, every one once an epoch, and told apart by fingerprints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from examples.sample_log import hash_tokens
from tests.data.helpers import SEQ_LEN, dataset_of, training, write_texts
from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data.dataset import Dataset
from torchtitan.data.documents import build_text
from torchtitan.data.store import open_writer
from torchtitan.data.synthetic import labelled_run
from torchtitan.data.tokenizer import ByteTokenizer, build_tokenizer

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


def test_seeds_change_the_order_alone(tmp_path: Path) -> None:
    datasets = [dataset_of(tmp_path, seed=seed, num_epochs=1) for seed in range(2)]
    orders = [[hash_tokens(d[k]["tokens"]) for k in range(d.num_samples or 0)] for d in datasets]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


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


def test_stores_and_texts_without_weights_are_one_source(tmp_path: Path) -> None:
    texts = {"a.txt": "a" * 99, "b.jsonl": '{"body": "b"}\n' * 50}
    paths = write_texts(tmp_path / "texts", texts)
    for name, length in (("c", 65), ("d", 113)):
        with open_writer(tmp_path / name, vocab_size=258) as writer:
            ids = ByteTokenizer().encode_batch([name * length])
            writer.add(ids[0], ends_document=True)
    entries = [*paths, str(tmp_path / "c"), str(tmp_path / "d.bin")]
    dataset = dataset_of(tmp_path, dataset_path=entries, dataset_text_key="body", num_epochs=1)
    expected = [
        *cuts(stream(["a" * 99, *["b"] * 50])),
        *cuts([ord("c")] * 65),
        *cuts([ord("d")] * 113),
    ]
    assert Counter(sample(dataset, k) for k in range(len(expected))) == Counter(expected)
    assert dataset.num_samples == len(expected)


def test_ids_of_another_tokenizer(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store", vocab_size=2**16) as writer:
        writer.add(torch.full((99,), 300).numpy(), ends_document=True)
    with pytest.raises(DataError, match=naming(257, 300)):
        dataset_of(tmp_path, dataset_path=[str(tmp_path / "store")])


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


def test_masked_labels(tmp_path: Path) -> None:
    plain = dataset_of(tmp_path, dataset="synthetic")
    masked = dataset_of(tmp_path, dataset="synthetic_masked")
    again = dataset_of(tmp_path, dataset="synthetic_masked")
    counts = Counter()
    for k in range(500):
        item = masked[k]
        valid = item["labels"] != -100
        counts[int(valid.sum())] += 1
        assert torch.equal(item["tokens"], plain[k]["tokens"])
        assert torch.equal(item["labels"][valid], plain[k]["labels"][valid])
        assert torch.equal(item["labels"], again[k]["labels"])
    assert set(counts) == set(range(SEQ_LEN + 1))
    assert masked.fingerprint != plain.fingerprint
    runs = [[labelled_run(k, seq_len=SEQ_LEN, seed=seed) for k in range(20)] for seed in (0, 1)]
    assert runs[0] != runs[1]
