"""Preparing many files: the same store by any number of processes, stopped and gone on with."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, as_completed
from itertools import count, islice
from pathlib import Path

import pytest
from filelock import FileLock

from tests.data.helpers import write_texts
from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data import prepare_files as prepare_files_module
from torchtitan.data.corpus import FileCorpus
from torchtitan.data.prepare import tokenize
from torchtitan.data.prepare_files import Summary, prepare_files
from torchtitan.data.store_writer import open_writer
from torchtitan.data.tokenizer import build_tokenizer

NAME = "bpe_2048"


@pytest.fixture(autouse=True)
def _each_file_is_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_files_module, "MAX_JOB_BYTES", 0)


def corpus_of(folder: Path) -> FileCorpus:
    texts = {f"{i}.jsonl": f'{{"text": "café {i}"}}\n' * (i + 1) for i in range(4)}
    texts["long.txt"] = "many words " * 500
    return FileCorpus(tuple(map(Path, write_texts(folder, texts))), "text")


def bytes_of(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def prepare(corpus: FileCorpus, prefix: Path, num_workers: int) -> Summary:
    return prepare_files(corpus, prefix=str(prefix), tokenizer_path=NAME, num_workers=num_workers)


@pytest.mark.promise("token-stores")
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_store_is_that_of_one_reader(tmp_path: Path, num_workers: int) -> None:
    corpus, tokenizer = corpus_of(tmp_path / "texts"), build_tokenizer(NAME)
    with open_writer(tmp_path / "wanted", vocab_size=tokenizer.vocab_size) as writer:
        text_bytes = tokenize(corpus, tokenizer=tokenizer, writer=writer)
    summary = prepare(corpus, tmp_path / "new" / "store", num_workers)
    assert bytes_of(tmp_path / "new" / "store") == bytes_of(tmp_path / "wanted")
    assert not (tmp_path / "new" / "store.parts").exists()
    assert summary == Summary(11, writer.num_tokens, text_bytes)
    assert text_bytes == 10 * len("café 0".encode()) + 5500
    assert f"{text_bytes / writer.num_tokens:.2f} bytes per token" in str(summary)


def test_small_files_are_done_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = corpus_of(tmp_path / "texts")
    prepare(corpus, tmp_path / "each", 1)
    caplog.set_level(logging.INFO)
    # the first is full before the long one
    monkeypatch.setattr(prepare_files_module, "MAX_JOB_BYTES", 100)
    monkeypatch.setattr(prepare_files_module, "NUM_JOBS", 1)
    prepare(corpus, tmp_path / "together", 1)
    assert caplog.text.count("tokenizing 3 files") == 1
    assert bytes_of(tmp_path / "together") == bytes_of(tmp_path / "each")


def test_what_was_done_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus, prefix = corpus_of(tmp_path / "texts"), tmp_path / "store"
    good = corpus.files[2].read_text()
    corpus.files[2].write_text(good + "{")
    with pytest.raises(DataError, match=naming(f"{corpus.files[2]} line 4")):
        prepare(corpus, prefix, 2)
    assert f"{prefix}.parts" in caplog.text
    assert not Path(f"{prefix}.bin").exists()
    done = {path: path.stat().st_ino for path in Path(f"{prefix}.parts").glob("*/tokens.bin")}
    assert done
    corpus.files[2].write_text(good)
    caplog.clear()
    caplog.set_level(logging.INFO)
    prepare(corpus, prefix, 1)
    assert caplog.text.count("tokenizing ") == len(corpus.files) - len(done)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_mistakes_of_all_files_are_told(tmp_path: Path, num_workers: int) -> None:
    corpus = corpus_of(tmp_path / "texts")
    for number in (1, 2):
        corpus.files[number].write_text('{"text": "a"}\n{')
    with pytest.raises(DataError) as error:
        prepare(corpus, tmp_path / "store", num_workers)
    assert sorted(line.partition(" must")[0] for line in str(error.value).splitlines()) == [
        f"{corpus.files[number]} line 2" for number in (1, 2)
    ]


def test_a_first_file_that_is_wrong_leaves_nothing(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "texts")
    corpus.files[0].write_text("{")
    with pytest.raises(DataError, match=naming(f"{corpus.files[0]} line 1")):
        prepare(corpus, tmp_path / "store", 1)
    assert [*tmp_path.iterdir()] == [tmp_path / "texts"]


def test_many_parts_are_not_open_at_once(tmp_path: Path) -> None:
    texts = {f"{i}.txt": f"text {i}" for i in range(30)}
    corpus = FileCorpus(tuple(map(Path, write_texts(tmp_path / "texts", texts))), "text")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # the limit is on the number of a descriptor: leave 40 free ones below it
    used = {int(name) for name in os.listdir("/dev/fd")}
    free = (number for number in count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, 40, None)), limits[1]))
    try:
        assert prepare(corpus, tmp_path / "store", 1).num_documents == 30
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_waits_is_not_begun_when_stopped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stopping(jobs: list[Future[Path]]) -> Iterator[Future[Path]]:
        yield next(as_completed(jobs))
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_files_module, "as_completed", stopping)
    texts = {f"{i}.txt": f"text {i} " * 10_000 for i in range(60)}
    corpus = FileCorpus(tuple(map(Path, write_texts(tmp_path / "texts", texts))), "text")
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "store", 2)
    assert 0 < len([*(tmp_path / "store.parts").glob("*/about.json")]) < 30
    assert f"{tmp_path}/store.parts" in caplog.text


@pytest.mark.slow
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    paths = write_texts(tmp_path, {f"{i}.txt": f"{i} words " * 3_000_000 for i in range(2)})
    script = [sys.executable, "-m", "torchtitan", "prepare", str(tmp_path / "store")]
    process = subprocess.Popen(
        [*script, *paths, "--tokenizer", NAME, "--workers", "2"], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not [*tmp_path.glob("store.parts/*.lock")]:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)  # the end of what they write: all have ended
    assert process.returncode == -signal.SIGTERM


def test_one_process_at_a_time_writes_a_store(tmp_path: Path) -> None:
    corpus, prefix = corpus_of(tmp_path / "texts"), tmp_path / "store"
    with FileLock(f"{prefix}.parts/lock"), pytest.raises(DataError, match=naming(prefix)):
        prepare(corpus, prefix, 1)
    prepare(corpus, prefix, 1)
    assert not Path(f"{prefix}.parts").exists()
