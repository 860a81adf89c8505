"""Tokenising once: the right tokens in the right order, built by one process, found by the next."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data import prepare
from torchtitan.data.corpus import Corpus, file_corpus
from torchtitan.data.prepare import cached_store
from torchtitan.data.synthetic import synthetic_corpus
from torchtitan.data.text import Ids
from torchtitan.data.tokenizer import ByteTokenizer, build_tokenizer


def corpus_of(folder: Path, texts: Sequence[str]) -> Corpus:
    folder.mkdir(exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i:04}.txt").write_text(text)
    return file_corpus(tuple(sorted(folder.iterdir())), "text")


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


@pytest.mark.promise("token-stores")
@pytest.mark.parametrize("name", ["byte", "bpe_2048"])
def test_tokens_are_the_documents_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # many small batches, so that threads overtake one another
    monkeypatch.setattr(prepare, "BATCH_CHARS", 50)
    texts = [f"document {i} " * (i % 17 + 1) for i in range(300)]
    tokenizer = build_tokenizer(name)
    corpus = corpus_of(tmp_path / "texts", texts)
    store = cached_store(corpus, tokenizer=tokenizer, cache=str(tmp_path / "cache"))
    expected = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    assert store.tokens.tolist() == [i for ids in expected for i in ids]
    assert store.lengths.tolist() == [len(ids) for ids in expected]
    assert store.num_documents == len(texts)


class CountingTokenizer(ByteTokenizer):
    """Counts the texts that it encodes."""

    def __init__(self) -> None:
        self.num_texts = 0

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        self.num_texts += len(texts)
        return super().encode_batch(texts)


@pytest.mark.promise("token-stores")
def test_tokenised_once_and_again_after_a_change(tmp_path: Path) -> None:
    tokenizer, cache = CountingTokenizer(), tmp_path / "cache"
    corpus = corpus_of(tmp_path / "texts", ["one", "two"])

    def hash_now() -> str:
        return cached_store(corpus, tokenizer=tokenizer, cache=str(cache)).content_hash()

    first = hash_now()
    assert (hash_now(), tokenizer.num_texts) == (first, 2)
    # another text of the same length, with the same modification time
    status = corpus.files[1].stat()
    corpus.files[1].write_text("TWO")
    os.utime(corpus.files[1], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hash_now() != first
    assert tokenizer.num_texts == 4
    # the same content: tokenised again, yet the same data
    corpus.files[1].write_text("two")
    assert hash_now() == first
    other = build_tokenizer("bpe_2048")
    assert cached_store(corpus, tokenizer=other, cache=str(cache)).num_tokens < 10
    assert len(entries(cache)) == 4


@pytest.mark.promise("token-stores")
def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    corpus = corpus_of(tmp_path / "texts", ["one", "two"])
    cached_store(corpus, tokenizer=ByteTokenizer(), cache=str(cache))
    (name,) = entries(cache)
    (cache / name).rename(cache / f"{name}.tmp")
    (cache / f"{name}.tmp" / "tokens.bin").write_bytes(b"half")
    store = cached_store(corpus, tokenizer=ByteTokenizer(), cache=str(cache))
    assert bytes(store.tokens[:3].astype(np.uint8)) == b"one"
    assert entries(cache) == [name]


@pytest.mark.parametrize("file", ["tokens.bin", "tokens.idx", "about.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "[]"])
def test_a_damaged_cache_is_named(tmp_path: Path, file: str, damage: str) -> None:
    cache = tmp_path / "cache"
    corpus = corpus_of(tmp_path / "texts", ["one", "two"])
    cached_store(corpus, tokenizer=ByteTokenizer(), cache=str(cache))
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    data = bytearray((folder / file).read_bytes())
    data[0] ^= 1
    damaged = {"flip": data, "cut": data[: len(data) // 2], "[]": b"[]"}
    if damage == "remove":
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(damaged[damage])
    with pytest.raises(DataError, match=naming(folder)):
        cached_store(corpus, tokenizer=ByteTokenizer(), cache=str(cache))
    shutil.rmtree(folder)
    cached_store(corpus, tokenizer=ByteTokenizer(), cache=str(cache))


class SlowTokenizer(ByteTokenizer):
    """Leaves time for others to arrive, and notes who encoded."""

    def __init__(self, notes: str) -> None:
        self.notes = Path(notes)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        (self.notes / str(os.getpid())).touch()
        time.sleep(0.5)
        return super().encode_batch(texts)


def build_in_process(cache: str, notes: str, start: str) -> tuple[int, str]:
    # arrive together, however long each process took to start
    (Path(start) / str(os.getpid())).touch()
    while len(os.listdir(start)) < 2:
        time.sleep(0.01)
    store = cached_store(synthetic_corpus(), tokenizer=SlowTokenizer(notes), cache=cache)
    return store.num_tokens, store.content_hash()


@pytest.mark.slow
def test_processes_build_once_and_wait(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("cache", "notes", "start")]
    for folder in folders:
        os.mkdir(folder)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.starmap(build_in_process, [folders] * 2, chunksize=1)
    assert first == second
    assert len(os.listdir(folders[1])) == 1
    assert len(entries(tmp_path / "cache")) == 1
