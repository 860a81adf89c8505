"""Preparing many files: the same store by any number of processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import write_texts
from torchtitan.base.errors import DataError
from torchtitan.data.corpus import Corpus, file_corpus
from torchtitan.data.files import find_files
from torchtitan.data.prepare import prepare_files
from torchtitan.data.store import TokenStore, open_writer
from torchtitan.data.tokenizer import build_tokenizer

NAME = "bpe_2048"


def corpus_of(folder: Path) -> Corpus:
    texts = {f"{i}.jsonl": f'{{"text": "café {i}"}}\n' * (i + 1) for i in range(4)}
    texts["long.txt"] = "many words " * 500
    return file_corpus(tuple(map(Path, write_texts(folder, texts))), "text")


def bytes_of(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def prepare(corpus: Corpus, prefix: Path, num_workers: int) -> dict[str, int]:
    tokenizer = build_tokenizer(NAME)
    return prepare_files(corpus, prefix=str(prefix), tokenizer=tokenizer, num_processes=num_workers)


@pytest.mark.promise("token-stores")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_store_is_that_of_one_reader(tmp_path: Path, num_workers: int) -> None:
    corpus, tokenizer = corpus_of(tmp_path / "texts"), build_tokenizer(NAME)
    with open_writer(tmp_path / "wanted", vocab_size=tokenizer.vocab_size) as writer:
        texts = [f"café {i}" for i in range(4) for _ in range(i + 1)] + ["many words " * 500]
        for text in texts:
            ids = np.array([*tokenizer.encode(text), tokenizer.eos_id])
            writer.add(ids, ends_document=True)
    summary = prepare(corpus, tmp_path / "new" / "store", num_workers)
    assert bytes_of(tmp_path / "new" / "store") == bytes_of(tmp_path / "wanted")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["store.bin", "store.idx"]
    text_bytes = sum(len(text.encode()) for text in texts)
    counts = {"num_documents": 11, "num_tokens": writer.num_tokens, "text_bytes": text_bytes}
    assert counts.items() <= summary.items()


@pytest.mark.promise("validation")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_held_out_documents_are_a_store_beside(tmp_path: Path, num_workers: int) -> None:
    texts = [f"text {i % 90}" for i in range(200)]
    lines = {f"{n}.jsonl": "".join(f'{{"text": "{t}"}}\n' for t in texts[n::3]) for n in range(3)}
    corpus = file_corpus(tuple(map(Path, write_texts(tmp_path / "texts", lines))))
    tokenizer, prefix = build_tokenizer(NAME), str(tmp_path / "store")
    notes = prepare_files(
        corpus,
        prefix=prefix,
        tokenizer=tokenizer,
        holdout_fraction=0.2,
        num_processes=num_workers,
    )
    stores = [TokenStore(prefix), TokenStore(f"{prefix}.holdout-0.2")]
    trained, held_out = (
        [tokenizer.decode(store.document(n)[:-1].tolist()) for n in range(store.num_documents)]
        for store in stores
    )
    assert sorted(trained + held_out) == sorted(texts)
    assert not set(trained) & set(held_out)
    assert 0 < len(held_out) == notes["num_held_out"] < 100
    # a folder of prepared stores does not train on them
    (tmp_path / "stores").mkdir()
    for file in tmp_path.glob("store.*"):
        if file.is_file():
            file.rename(tmp_path / "stores" / file.name)
    assert find_files(str(tmp_path / "stores")) == [tmp_path / "stores" / "store.idx"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_mistakes_of_all_files_are_told(tmp_path: Path, num_workers: int) -> None:
    corpus = corpus_of(tmp_path / "texts")
    for number in (1, 2):
        corpus.files[number].write_text("{")
    with pytest.raises(DataError) as error:
        prepare(corpus, tmp_path / "store", num_workers)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert all(str(corpus.files[number]) in lines[number - 1] for number in (1, 2))


@pytest.mark.slow
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    paths = write_texts(tmp_path, {f"{i}.txt": f"{i} words " * 3_000_000 for i in range(2)})
    script = [sys.executable, "-m", "torchtitan", "prepare", str(tmp_path / "store")]
    process = subprocess.Popen(
        [*script, *paths, "--tokenizer", NAME, "--workers", "2"], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not [*tmp_path.glob("store.bin.tmp-*")]:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)  # the end of what they write: all have ended
    assert process.returncode == -signal.SIGTERM


def held_out(prefix: Path) -> list[Path]:
    return sorted(prefix.parent.glob(f"{prefix.name}.holdout-*"))
