"""Tokenise many files beforehand: several processes, each some files at a time, then one store.

A large file, or neighbours that are small, become a store of their own in the folder
`PREFIX.parts`, a cache as any (`prepare.py`). So what was stopped goes on with what is not done,
and changed files are done again. When all are done, their documents are written one after another
into the store, the same as if one process had read all files, and the folder is removed.

Processes and not only threads: reading JSON and writing stores hold the interpreter lock.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from torchtitan.base.cores import num_cores
from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.data.prepare import cached_store, open_cached, show_progress
from torchtitan.data.source import FileCorpus, check_heads
from torchtitan.data.split import content_number
from torchtitan.data.store import open_writer
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)

# small enough that all processes end at about the same time, large enough that jobs cost nothing
MAX_JOB_BYTES, NUM_JOBS = 1 << 25, 64


@dataclass
class Summary:
    """What a store holds."""

    num_documents: int = 0
    num_tokens: int = 0
    text_bytes: int = 0
    longest: int = 0
    longest_at: int = 0
    """Number of the longest document; the first is 1."""
    num_duplicates: int = 0
    """Documents that are the same as an earlier one."""

    def __str__(self) -> str:
        ratio = self.text_bytes / self.num_tokens
        return (
            f"{amount(self.num_documents, 'document')}, {amount(self.num_tokens, 'token')}\n"
            f"{self.text_bytes / 1e6:.1f} MB of text, {ratio:.2f} bytes per token; the longest "
            f"document, number {self.longest_at}, has {amount(self.longest, 'token')}; "
            f"{amount(self.num_duplicates, 'document')} the same as an earlier one"
        )


def prepare_files(
    corpus: FileCorpus, *, prefix: str, tokenizer_path: str, num_workers: int = 0
) -> Summary:
    """Write the store `prefix` from all files of a corpus.

    `num_workers`: processes; 0 takes one for each core, and never more than there is to do at once.

    Raises:
        DataError: A file cannot be read; what is done is kept. Or another process writes `prefix`.
    """
    tokenizer = build_tokenizer(tokenizer_path, key="--tokenizer")
    check_heads(corpus.files)
    with _alone(prefix):
        return _prepare(corpus, prefix, tokenizer_path, tokenizer, num_workers)


@contextmanager
def _alone(prefix: str) -> Iterator[None]:
    """Keep other processes from the same work; raises DataError if one is at it."""
    file = Path(f"{prefix}.parts.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise DataError(
            f"another process prepares {prefix}; wait until it ends, or name another prefix"
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def _prepare(
    corpus: FileCorpus, prefix: str, tokenizer_path: str, tokenizer: Tokenizer, num_workers: int
) -> Summary:
    folder = Path(f"{prefix}.parts")
    folder.mkdir(exist_ok=True)
    each = [*_divided(corpus)]
    num_workers = min(num_workers or num_cores(), len(each))
    try:
        if num_workers == 1:
            parts = [
                cached_store(one, tokenizer=tokenizer, cache=str(folder)).prefix for one in each
            ]
        else:
            parts = _in_processes(each, corpus, tokenizer_path, str(folder), num_workers)
    except BaseException:
        if any(folder.glob("*/about.json")):
            logger.warning("what is done is kept in %s: start again to go on from there", folder)
        else:
            shutil.rmtree(folder)
        raise
    summary = _put_together(parts, prefix=prefix, tokenizer=tokenizer)
    shutil.rmtree(folder)
    return summary


def _divided(corpus: FileCorpus) -> Iterator[FileCorpus]:
    """Yield neighbouring files together, until there are enough bytes for a job."""
    enough = min(MAX_JOB_BYTES, corpus.num_bytes // NUM_JOBS)
    files: list[Path] = []
    size = 0
    for file in corpus.files:
        files.append(file)
        size += file.stat().st_size
        if size >= enough:
            yield replace(corpus, files=tuple(files))
            files, size = [], 0
    if files:
        yield replace(corpus, files=tuple(files))


def _in_processes(
    each: Sequence[FileCorpus],
    whole: FileCorpus,
    tokenizer_path: str,
    folder: str,
    num_workers: int,
) -> list[str]:
    """Return the prefix of each part."""
    num_threads = max(num_cores() // num_workers, 1)
    # not forked: threads of this process may hold locks
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(num_workers, spawn, _start_worker) as pool,
        show_progress(whole) as advance,
    ):
        jobs = {
            pool.submit(_tokenize, one, tokenizer_path, folder, num_threads): one for one in each
        }
        try:
            for job in as_completed(jobs):
                job.result()
                advance(jobs[job].num_bytes)
        except BrokenProcessPool as error:
            raise DataError(
                "a process ended before its work, perhaps for want of memory; try fewer --workers"
            ) from error
        except BaseException:
            # what has begun is done and kept, what waits is not begun
            pool.shutdown(cancel_futures=True)
            raise
        return [job.result() for job in jobs]


def _start_worker() -> None:
    """End at once, without a traceback, by a signal to all or when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@functools.cache
def _tokenizer(path: str) -> Tokenizer:
    """Build the tokenizer once in a process: a large vocabulary takes long to read."""
    return build_tokenizer(path)


def _tokenize(corpus: FileCorpus, tokenizer_path: str, folder: str, num_threads: int) -> str:
    """Run in a process; return the prefix of the store."""
    return cached_store(
        corpus,
        tokenizer=_tokenizer(tokenizer_path),
        cache=folder,
        num_threads=num_threads,
        advance=lambda num_bytes: None,
    ).prefix


def _put_together(parts: Sequence[str], *, prefix: str, tokenizer: Tokenizer) -> Summary:
    summary = Summary()
    hashes = array("Q")
    with open_writer(prefix, vocab_size=tokenizer.vocab_size) as writer:
        for part in parts:  # one open at a time: each holds several files
            store, about = open_cached(Path(part).parent)
            summary.text_bytes += about["text_bytes"]
            for number in range(store.num_documents):
                document = store.document(number)
                writer.add(document, ends_document=True)
                hashes.append(content_number(document, end=tokenizer.eos_id))
                if len(document) > summary.longest:
                    summary.longest = len(document)
                    summary.longest_at = writer.num_documents
    summary.num_documents, summary.num_tokens = writer.num_documents, writer.num_tokens
    summary.num_duplicates = len(hashes) - len(np.unique(np.array(hashes, np.uint64)))
    return summary
