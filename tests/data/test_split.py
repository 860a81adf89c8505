"""Documents held out by their content: against each document looked at by hand."""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.helpers import loader_of, training, write_texts
from tests.finetune.chats import write_lines
from torchtitan.base.errors import DataError
from torchtitan.data.corpus import file_corpus
from torchtitan.data.dataset import Dataset
from torchtitan.data.documents import build_text
from torchtitan.data.holdout import ALL, Holdout
from torchtitan.data.prepare import prepare_files
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.finetune.data import build_examples

END = 257
FRACTION = 0.3
TRAINED, HELD_OUT = Holdout(FRACTION, held_out=False), Holdout(FRACTION, held_out=True)
BOTH = pytest.mark.parametrize("side", [TRAINED, HELD_OUT], ids=["trained", "held out"])
TEXTS = [f"[{i}]" + "so, " * (i * i % 9) for i in range(150)]


def is_held_out(text: str, fraction: float = FRACTION) -> bool:
    """By hand, from the text's bytes, which are its tokens."""
    tokens = struct.pack(f"<{len(text.encode())}i", *text.encode())
    digest = hashlib.blake2b(tokens, digest_size=8, person=b"validation split").digest()
    return int.from_bytes(digest, "little") / 2**64 < fraction


def write(path: Path, texts: list[str]) -> str:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    return write_texts(path.parent, {path.name: lines})[0]


def job_of(cache: Path, paths: list[str], **settings: Any) -> TrainingConfig:
    settings = {"num_epochs": 1, "attn_mask_type": "block_causal", **settings}
    return training(cache, dataset="files", dataset_path=paths, **settings)


def build(job: TrainingConfig, side: Holdout = ALL) -> Dataset:
    return build_text(job, tokenizer=ByteTokenizer(), seed=0, holdout=side)


def documents_of(dataset: Dataset) -> list[str]:
    """The texts of all documents of a data set of one source."""
    [source] = dataset.sources
    ids = [i for store in source.stores for i in store.tokens.tolist()]
    assert ids[-1] == END
    return [bytes(part).decode() for part in split_at_end(ids)]


def split_at_end(ids: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for i in ids:
        if i == END:
            parts.append([])
        else:
            parts[-1].append(i)
    return parts[:-1]


def assert_same_samples(ours: Any, theirs: Any) -> None:
    assert ours.num_samples == theirs.num_samples
    for k in range(ours.num_samples):
        sample, expected = ours[k], theirs[k]
        assert sample.keys() == expected.keys()
        assert all(torch.equal(sample[key], expected[key]) for key in expected)


@pytest.mark.promise("validation")
@BOTH
@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9])
def test_the_samples_are_those_of_the_documents_alone(
    tmp_path: Path, side: Holdout, fraction: float
) -> None:
    """Tokens, labels, lengths and order: as of a file that holds these documents and no others."""
    texts = [TEXTS[7] * 40, *TEXTS, "odd" * 90, *(text + "!" for text in TEXTS)]
    side = Holdout(fraction, held_out=side.held_out)
    ours = [text for text in texts if is_held_out(text, fraction) == side.held_out]
    assert 0 < len(ours) < len(texts)
    dataset = build(job_of(tmp_path / "cache", [write(tmp_path / "all.jsonl", texts)]), side)
    alone = build(job_of(tmp_path / "cache", [write(tmp_path / "ours.jsonl", ours)]))
    assert_same_samples(dataset, alone)
    assert documents_of(dataset) == ours


@BOTH
def test_a_prepared_store_needs_its_twin(tmp_path: Path, side: Holdout) -> None:
    corpus = file_corpus((Path(write(tmp_path / "a.jsonl", TEXTS)),))
    prefix, tokenizer = str(tmp_path / "s"), ByteTokenizer()
    prepare_files(corpus, prefix=prefix, tokenizer=tokenizer, holdout_fraction=FRACTION)
    dataset = build(job_of(tmp_path / "cache", [prefix]), side)
    assert documents_of(dataset) == [t for t in TEXTS if is_held_out(t) == side.held_out]
    assert_same_samples(pickle.loads(pickle.dumps(dataset)), dataset)  # as a worker gets it
    other = Holdout(0.2, held_out=side.held_out)
    with pytest.raises(DataError, match=r"^holdout_fraction: .*0\.2.*validation\.dataset_path"):
        build(job_of(tmp_path / "cache", [prefix]), other)


@pytest.mark.promise("validation")
def test_no_held_out_document_in_a_mixture(tmp_path: Path) -> None:
    """Over several epochs of weighted sources, document by document; the others are all there."""
    paths = [write(tmp_path / f"{i}.jsonl", TEXTS[i : i + 50]) for i in (0, 50, 100)]
    job = job_of(tmp_path / "cache", paths, dataset_weights=[3, 2, 1], num_epochs=3, seq_len=200)
    dataset = build(job, TRAINED)
    assert dataset.num_samples is not None
    loader = loader_of(dataset, batch=1)
    seen: set[str] = set()
    for [batch] in loader:
        parts = batch["tokens"][0].split(batch["document_lengths"].tolist())
        seen |= {bytes(ids[:-1].tolist()).decode() for ids in parts if ids[-1] == END}
    whole = {text for text in seen if text.startswith("[")}
    assert whole <= set(TEXTS)
    assert len(whole) > 60
    assert not any(map(is_held_out, whole))
    held_out = build(job_of(tmp_path / "cache", paths, dataset_weights=[3, 2, 1]), HELD_OUT)
    assert documents_of(held_out) == [text for text in TEXTS if is_held_out(text)]


@pytest.mark.promise("validation")
def test_added_documents_move_none(tmp_path: Path) -> None:
    def held_out(texts: list[str], *more: str) -> list[str]:
        path = write(tmp_path / f"{len(texts)}.jsonl", texts)
        return documents_of(build(job_of(tmp_path / "cache", [path, *more]), HELD_OUT))

    before = held_out(TEXTS[:100])
    grown = TEXTS[120:] + TEXTS[:50] + TEXTS[100:110] + TEXTS[50:100]
    after = held_out(grown, write(tmp_path / "more.jsonl", TEXTS[110:120]))
    assert [text for text in after if text in set(TEXTS[:100])] == before
    assert len(after) > len(before)


@pytest.mark.promise("validation")
def test_copies_are_on_one_side(tmp_path: Path) -> None:
    """In a file twice, and in another one that is a source of its own."""
    paths = [
        write(tmp_path / "a.jsonl", TEXTS + TEXTS[::-1]),
        write(tmp_path / "b.jsonl", TEXTS),
    ]
    job = job_of(tmp_path / "cache", paths, dataset_weights=[1, 1])
    for side in (TRAINED, HELD_OUT):
        dataset = build(job, side)
        ours = [text for text in TEXTS if is_held_out(text) == side.held_out]
        assert dataset.num_tokens == 3 * sum(len(text) + 1 for text in ours)


def examples_of(cache: Path, paths: list[str], *, side: Holdout = ALL, **settings: Any) -> Dataset:
    settings = {"num_epochs": 1, "seq_len": 40, **settings}
    job = training(cache, dataset="examples", dataset_path=paths, **settings)
    return build_examples(
        job, tokenizer=ByteTokenizer(), tokenizer_path="byte", seed=0, holdout=side
    )


@BOTH
@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_examples_are_divided(tmp_path: Path, side: Holdout, packing: str) -> None:
    values = [{"prompt": f"{i}", "completion": "ab"[i % 2] * (i % 20)} for i in range(99)] * 2
    how = {"packing": packing, "attn_mask_type": "block_causal"}

    def examples_in(dataset: Dataset) -> list[tuple[list[int], list[int]]]:
        assert dataset.num_samples is not None
        return sorted(
            (tokens.tolist(), labels.tolist())
            for sample in map(dataset.__getitem__, range(dataset.num_samples))
            for tokens, labels in zip(
                *(
                    sample[key].split(sample["document_lengths"].tolist())
                    for key in ("tokens", "labels")
                ),
                strict=True,
            )
            if (labels != -100).any()
        )

    whole = write_lines(tmp_path / "all.jsonl", values)
    ours = examples_of(tmp_path / "cache", whole, side=side, **how)
    alone = write_lines(
        tmp_path / "ours.jsonl", [v for v in values if example_is_held_out(v) == side.held_out]
    )
    assert examples_in(ours) == examples_in(examples_of(tmp_path / "cache", alone, **how))
    assert 20 < len(examples_in(ours)) < 180
    undivided = examples_of(tmp_path / "cache", whole, **how)
    assert len(examples_in(undivided)) == len([v for v in values if v["completion"]])
    assert len({str(d.fingerprint) for d in (ours, undivided)}) == 2


def example_is_held_out(value: dict[str, str]) -> bool:
    prompt, completion = value["prompt"].encode(), [*value["completion"].encode(), END]
    numbers = [2 * i for i in prompt] + [2 * i + 1 for i in completion]
    packed = struct.pack(f"<{len(numbers)}i", *numbers)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"validation split").digest()
    return int.from_bytes(digest, "little") / 2**64 < FRACTION
