"""Packing: everything once, nothing over the edge, and little left empty."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from tests.finetune.chats import write_lines
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.finetune.data import best_fit, build_examples, pack

DISTRIBUTIONS = {
    "uniform": lambda draw: 1 + int(draw() * 1024),
    "mostly short": lambda draw: 1 + int(1023 * draw() ** 4),
    "short and whole": lambda draw: 1024 if draw() < 0.3 else 1 + int(draw() * 64),
}


def lengths_of(name: str, num: int) -> list[int]:
    draw = random.Random(name).random
    return [DISTRIBUTIONS[name](draw) for _ in range(num)]


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("window", [10_000, 256])
def test_everything_once_and_nearly_full(name: str, window: int) -> None:
    lengths = lengths_of(name, 5000)
    groups = list(pack(lengths, capacity=1024, window=window))
    assert sorted(place for group in groups for place in group) == list(range(5000))
    assert all(sum(lengths[place] for place in group) <= 1024 for group in groups)
    for group in groups:
        assert len({place // window for place in group}) == 1
    padding = 1 - sum(lengths) / (1024 * len(groups))
    # in a small window the last groups have fewer examples to choose from
    assert padding < (0.01 if window > 5000 else 0.05), padding
    one_each = 1 - sum(lengths) / (1024 * len(lengths))
    assert padding < one_each / 10


def test_best_fit_is_the_fullest_that_has_room() -> None:
    # 6 and 5 open two groups; 4 fills the first; 3 and 2 the second
    assert best_fit([2, 3, 4, 5, 6], capacity=10) == [[4, 2], [3, 1, 0]]
    # 3 has room in the groups of 7 and of 6, and fills the first
    assert best_fit([6, 7, 3], capacity=10) == [[1, 2], [0]]
    # equal lengths in their order
    assert best_fit([5, 5, 5], capacity=10) == [[0, 1], [2]]
    # a single place is room too
    assert best_fit([9, 1], capacity=10) == [[0, 1]]
    assert best_fit([], capacity=10) == []


def test_never_more_than_eleven_ninths_of_the_fewest() -> None:
    # made by cutting 60 full samples into parts, so that the fewest possible are known
    draw = random.Random(0).random
    for _ in range(20):
        lengths = []
        for _ in range(60):
            cuts = sorted({int(draw() * 100) for _ in range(1 + int(draw() * 4))} | {0, 100})
            lengths += [b - a for a, b in pairwise(cuts)]
        assert 60 <= len(best_fit(lengths, capacity=100)) <= 60 * 11 / 9 + 1


@pytest.mark.promise("mixtures")
def test_files_in_the_proportion_of_their_weights(tmp_path: Path) -> None:
    paths = []
    for name, num in (("a", 40), ("b", 30)):
        paths.append(str(tmp_path / f"{name}.jsonl"))
        rows = [{"prompt": "p", "completion": name * (n + 1)} for n in range(num)]
        write_lines(Path(paths[-1]), list(rows))
    training = TrainingConfig(
        dataset="examples",
        dataset_path=tuple(paths),
        dataset_weights=(3.0, 1.0),
        dataset_cache=str(tmp_path / "cache"),
        seq_len=64,
        num_epochs=2,
    )
    tokenizer = build_tokenizer("byte")
    dataset = build_examples(training, tokenizer=tokenizer, tokenizer_path="byte", seed=0)
    assert dataset.num_samples is not None
    samples = [dataset[k]["labels"] for k in range(dataset.num_samples)]
    texts = [bytes(labels[labels >= 0][:-1].tolist()).decode() for labels in samples]
    assert 80 <= sum("a" in text for text in texts) <= 81  # two epochs of a, which ends first
    for end in range(4, len(texts), 4):
        assert abs(sum("a" in text for text in texts[:end]) - 0.75 * end) <= 1
    first = [len(text) for text in texts if "a" in text][:40]
    assert sorted(first) == [*range(1, 41)]
