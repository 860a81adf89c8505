"""Tokenize many files with several processes into one store.

A large file, or several small neighbours, become a store of their own in the folder `PREFIX.parts`,
a cache like any other (`prepare.py`). So the same command resumes after an interruption, and files
that changed are tokenized again. When all parts exist, their documents are written in order into
the store, exactly as if one process had read all files, and the folder is removed.

Processes, because reading JSON and writing stores hold the interpreter lock.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from torchtitan.base.errors import DataError, Violation
from torchtitan.base.log import plural
from torchtitan.data.cache import cached_store, open_cached
from torchtitan.data.corpus import FileCorpus
from torchtitan.data.prepare import num_cores
from torchtitan.data.readers import add_mistakes, check_heads, join_errors
from torchtitan.data.store_writer import open_writer
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)

# small enough that all processes end at about the same time, large enough that a job costs little
MAX_JOB_BYTES, NUM_JOBS = 1 << 25, 64


@dataclass(frozen=True)
class Summary:
    """Counts of a store."""

    num_documents: int
    num_tokens: int
    text_bytes: int

    def __str__(self) -> str:
        ratio = self.text_bytes / self.num_tokens
        return (
            f"{plural(self.num_documents, 'document')}, {plural(self.num_tokens, 'token')}\n"
            f"{self.text_bytes / 1e6:.1f} MB of text, {ratio:.2f} bytes per token"
        )


def prepare_files(
    corpus: FileCorpus, *, prefix: str, tokenizer_path: str, num_workers: int = 0
) -> Summary:
    """Write the store `prefix` from all files of a corpus.

    Args:
        corpus: Files to tokenize.
        prefix: Path of the store without the suffixes.
        tokenizer_path: As `model.tokenizer_path`.
        num_workers: Processes; 0 for one per core. At most one per part.

    Raises:
        DataError: A file cannot be read, or another process writes `prefix`. Finished parts are
            kept.
    """
    tokenizer = build_tokenizer(tokenizer_path, key="--tokenizer")
    try:
        check_heads(corpus.files)
    except DataError as error:
        raise _add_mistakes(error, [corpus]) from error
    folder = Path(f"{prefix}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            folders = _tokenize_parts(
                [*_divide(corpus)], tokenizer_path, cache=folder, num_workers=num_workers
            )
            summary = _concatenate(folders, prefix=prefix, vocab_size=tokenizer.vocab_size)
            shutil.rmtree(folder)
    except Timeout as error:
        raise DataError(f"another process prepares {prefix}; wait until it ends") from error
    return summary


def _tokenize_parts(
    parts: Sequence[FileCorpus], tokenizer_path: str, *, cache: Path, num_workers: int
) -> list[Path]:
    """Tokenize the parts of a corpus; return the folder of each store."""
    num_workers = min(num_workers or num_cores(), len(parts))
    try:
        if num_workers == 1:
            return _run_alone(parts, tokenizer_path, cache=cache)
        return _run_workers(parts, tokenizer_path, cache=cache, num_workers=num_workers)
    except BaseException:
        if any(cache.glob("*/about.json")):
            logger.warning("finished parts are kept in %s; run again to resume", cache)
        else:
            shutil.rmtree(cache)
        raise


def _divide(corpus: FileCorpus) -> Iterator[FileCorpus]:
    """Yield neighbouring files together, up to the size of a job."""
    job_bytes = min(MAX_JOB_BYTES, corpus.num_bytes // NUM_JOBS)
    files: list[Path] = []
    size = 0
    for file in corpus.files:
        files.append(file)
        size += file.stat().st_size
        if size >= job_bytes:
            yield replace(corpus, files=tuple(files))
            files, size = [], 0
    if files:
        yield replace(corpus, files=tuple(files))


def _run_alone(parts: Sequence[FileCorpus], tokenizer_path: str, *, cache: Path) -> list[Path]:
    """Tokenize the parts of a corpus one by one; return the folder of each store."""
    folders = []
    for number, part in enumerate(parts, start=1):
        try:
            folders.append(_tokenize(part, tokenizer_path, str(cache), 0))
        except DataError as error:
            raise _add_mistakes(error, parts[number:]) from error
    return folders


def _add_mistakes(error: DataError, parts: Sequence[FileCorpus]) -> DataError:
    """Return the error together with the mistakes of parts that were not tokenized.

    An error of the cache, such as a full disk, is returned unchanged.
    """
    if isinstance(error.problem, Violation) and "dataset_cache" in error.problem.keys:
        return error
    by_file = {file: replace(part, files=(file,)) for part in parts for file in part.files}
    return add_mistakes(error, [*by_file], lambda file: by_file[file].pieces())


def _run_workers(
    parts: Sequence[FileCorpus], tokenizer_path: str, *, cache: Path, num_workers: int
) -> list[Path]:
    """Tokenize the parts of a corpus in processes; return the folder of each store."""
    num_threads = max(num_cores() // num_workers, 1)
    # not forked: threads of this process may hold locks
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, spawn, _init_worker) as pool:
        jobs = [
            pool.submit(_tokenize, part, tokenizer_path, str(cache), num_threads) for part in parts
        ]
        try:
            for number, job in enumerate(as_completed(jobs), start=1):
                job.result()
                if 20 * number // len(jobs) > 20 * (number - 1) // len(jobs):  # in steps of 5 %
                    logger.info("%d of %s tokenized", number, plural(len(jobs), "part"))
        except BrokenProcessPool as error:
            raise DataError(
                "a process ended before its work, perhaps out of memory; try fewer --workers"
            ) from error
        except DataError as error:
            pool.shutdown(cancel_futures=True)
            waiting = [part for job, part in zip(jobs, parts, strict=True) if job.cancelled()]
            ended = [job.exception() for job in jobs if not job.cancelled()]
            found = join_errors([e for e in ended if isinstance(e, DataError)])
            raise _add_mistakes(found, waiting) from error
        except BaseException:
            # running jobs finish and are kept, waiting jobs are cancelled
            pool.shutdown(cancel_futures=True)
            raise
        return [job.result() for job in jobs]


def _init_worker() -> None:
    """End this process without a traceback on SIGINT, and when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@cache
def _tokenizer(path: str) -> Tokenizer:
    return build_tokenizer(path)  # once per process: reading a large vocabulary takes long


def _tokenize(part: FileCorpus, tokenizer_path: str, cache: str, num_threads: int) -> Path:
    tokenizer = _tokenizer(tokenizer_path)
    store = cached_store(part, tokenizer=tokenizer, cache=cache, num_threads=num_threads)
    return Path(store.prefix).parent


def _concatenate(folders: Sequence[Path], *, prefix: str, vocab_size: int) -> Summary:
    text_bytes = 0
    with open_writer(prefix, vocab_size=vocab_size) as writer:
        for folder in folders:  # one store open at a time: each holds several files
            store, notes = open_cached(folder)
            text_bytes += notes["text_bytes"]
            for number in range(store.num_documents):
                writer.add(store.document(number), ends_document=True)
    return Summary(writer.num_documents, writer.num_tokens, text_bytes)
