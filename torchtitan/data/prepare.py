"""Tokenize a corpus once, into a store that all ranks and later runs share.

Threads encode, since tiktoken and `tokenizers` release the interpreter lock while they work (two
threads were measured at 1.8 times one, two processes at 2.0). Processes would have to be started
safely beside CUDA and gloo, would import the user's main module again, and would pickle every text
and every token.

Finished stores are kept in `dataset_cache`, each in a folder named by a fingerprint of its sources.
One process per node writes the store under a file lock, in a temporary folder that is renamed when
the store is complete. The other processes wait for the lock and find the store. `cached` does this
for any function that fills a store. Finished stores are never deleted: the cache may be emptied by
hand while no run uses it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from torchtitan.base.errors import DataError
from torchtitan.base.log import plural
from torchtitan.data.corpus import Corpus
from torchtitan.data.files import Once, alone, user_path
from torchtitan.data.store import StoreWriter, TokenStore, open_writer
from torchtitan.data.text import Advance, Ids, Piece
from torchtitan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# part of the fingerprint: raise it if the same text gets other tokens
FORMAT = 2
ABOUT = "about.json"
BATCH_CHARS = 1 << 19
LONGEST_CHARS = 1 << 22
"""Characters up to which a document is encoded whole if it must be. Encoding takes 120 times that
in bytes."""
LOG_EVERY_SECONDS = 30.0
# no space, over quota, over the limit of a file
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cached_store(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    cache: str,
    num_threads: int = 0,
    advance: Advance | None = None,
    once: Once = alone,
) -> TokenStore:
    """Return the tokens of a corpus, from the cache or tokenized now.

    Args:
        corpus: Text to tokenize.
        tokenizer: Encodes the text.
        cache: Folder of finished stores.
        num_threads: Threads that encode; 0 for one per core.
        advance: Called with each number of bytes read, instead of showing progress.
        once: Reads the identity of the corpus in one process of this machine.

    Raises:
        DataError: Text cannot be read, or the cache cannot be written.
    """

    def write(writer: StoreWriter) -> dict[str, object]:
        text_bytes = tokenize(
            corpus, tokenizer=tokenizer, writer=writer, num_threads=num_threads, advance=advance
        )
        fingerprint = tokenizer.fingerprint
        return {"source": corpus.name, "tokenizer": fingerprint, "text_bytes": text_bytes}

    store, notes = cached(
        [FORMAT, tokenizer.fingerprint, corpus.name, once(corpus.identity)],
        name=corpus.name,
        cache=cache,
        vocab_size=tokenizer.vocab_size,
        write=write,
    )
    num_tokens, folder = plural(store.num_tokens, "token"), Path(store.prefix).parent
    logger.info("%s: %s in %s", notes["source"], num_tokens, folder)
    return store


def cached(
    sources: Sequence[object],
    *,
    name: str,
    cache: str,
    vocab_size: int,
    write: Callable[[StoreWriter], Mapping[str, object]],
) -> tuple[TokenStore, dict[str, Any]]:
    """Return a store and the notes stored with it, from the cache or written now.

    Args:
        sources: Everything that decides the content, as JSON.
        name: Name of the content for messages.
        cache: Folder of finished stores.
        vocab_size: One more than the largest number in the store.
        write: Fills the store and returns the notes.

    Raises:
        DataError: The cache cannot be written, or is damaged.
    """
    key = hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:32]
    root = user_path(cache, key="dataset_cache")
    folder = root / key
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            with _locked(root / f"{key}.lock", name=name):
                # another process may have written it meanwhile
                if not folder.exists():
                    _build(folder, vocab_size=vocab_size, write=write)
    except OSError as error:
        rule = f"cannot write tokenized data to {root}: {error.strerror or error}"
        if error.filename is not None and Path(error.filename) != root:
            rule += f" ({error.filename})"
        room = "free space, or " if error.errno in DISK_FULL else ""
        raise DataError.at("dataset_cache", f"{rule}; {room}name another folder") from error
    return open_cached(folder)


def open_cached(folder: Path) -> tuple[TokenStore, dict[str, Any]]:
    """Return a store of the cache and its notes, after checking that it is unchanged."""
    try:
        notes = json.loads((folder / ABOUT).read_text())
        store = TokenStore(folder / "tokens")
        is_unchanged = store.content_hash() == notes["content"]
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        raise DataError(f"the tokenized data in {folder} is damaged; delete it: {error}") from error
    if not is_unchanged:
        raise DataError(f"the tokenized data in {folder} changed since it was written; delete it")
    return store, notes


def _build(
    folder: Path, *, vocab_size: int, write: Callable[[StoreWriter], Mapping[str, object]]
) -> None:
    unfinished = folder.with_suffix(".tmp")
    # left by a process that was killed: this process has the lock
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with open_writer(unfinished / "tokens", vocab_size=vocab_size) as writer:
            notes = write(writer)
        store = TokenStore(unfinished / "tokens")
        about = {
            **notes,
            "num_documents": store.num_documents,
            "num_tokens": store.num_tokens,
            "content": store.content_hash(),
        }
        (unfinished / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(file: Path, *, name: str) -> Iterator[None]:
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("waiting for the process that tokenizes %s", name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def tokenize(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    writer: StoreWriter,
    num_threads: int = 0,
    advance: Advance | None = None,
) -> int:
    """Write all documents of a corpus in order, each followed by the end-of-document token.

    Args:
        corpus: Text to tokenize.
        tokenizer: Encodes the text.
        writer: Receives the tokens.
        num_threads: Threads that encode; 0 for one per core.
        advance: Called with each number of bytes read, instead of showing progress.

    Returns:
        The size of the text in bytes.
    """
    num_threads = num_threads or num_cores()
    start = time.monotonic()
    size, threads = corpus.num_bytes / 1e6, plural(num_threads, "thread")
    logger.info("tokenizing %s (%.1f MB) with %s", corpus.name, size, threads)
    end = np.array([tokenizer.eos_id], np.uint32)
    text_bytes = 0
    progress = nullcontext(advance) if advance else show_progress(corpus)
    with progress as advance, ThreadPoolExecutor(num_threads) as pool:
        # a few batches ahead keep all threads busy
        pending: deque[tuple[list[Piece], Future[list[Ids]]]] = deque()
        pieces = corpus.pieces(advance)
        for batch in _batches(pieces if tokenizer.encodes_pieces else _documents(pieces)):
            texts = [piece.text for piece in batch]
            text_bytes += sum(len(text.encode()) for text in texts)
            pending.append((batch, pool.submit(tokenizer.encode_batch, texts)))
            if len(pending) > 2 * num_threads:
                _write(*pending.popleft(), end=end, writer=writer)
        while pending:
            _write(*pending.popleft(), end=end, writer=writer)
    logger.info(
        "%s: %s, %s in %.1f s",
        corpus.name,
        plural(writer.num_documents, "document"),
        plural(writer.num_tokens, "token"),
        time.monotonic() - start,
    )
    return text_bytes


def _documents(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Join pieces to documents, or to parts of LONGEST_CHARS of longer ones."""
    texts: list[str] = []
    size, warned = 0, False
    for piece in pieces:
        texts.append(piece.text)
        size += len(piece.text)
        is_long = size >= LONGEST_CHARS and not piece.ends_document
        if is_long and not warned:
            warned = True
            logger.warning(
                "%s has over %d characters: it is encoded in parts, each of which the tokenizer "
                "begins like a document",
                piece.where,
                LONGEST_CHARS,
            )
        if piece.ends_document or is_long:
            yield piece._replace(text="".join(texts))
            texts, size = [], 0


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write(
    pieces: list[Piece], encoded: Future[list[Ids]], *, end: Ids, writer: StoreWriter
) -> None:
    for piece, ids in zip(pieces, encoded.result(), strict=True):
        tokens = np.concatenate([ids, end]) if piece.ends_document else ids
        writer.add(tokens, ends_document=piece.ends_document)


@contextmanager
def show_progress(corpus: Corpus) -> Iterator[Advance]:
    """Yield a function to call with each number of bytes read.

    It advances a bar on a terminal, and otherwise logs a line every 30 seconds.
    """
    total = corpus.num_bytes
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"tokenizing {corpus.name}", total=total)
            yield lambda num_bytes: bar.advance(task, num_bytes)
        return
    num_read, logged_at = 0, time.monotonic()

    def advance(num_bytes: int) -> None:
        nonlocal num_read, logged_at
        num_read += num_bytes
        if time.monotonic() - logged_at >= LOG_EVERY_SECONDS:
            logged_at = time.monotonic()
            percent = 100 * num_read / max(total, 1)
            logger.info("tokenizing %s: %.0f %% read", corpus.name, percent)

    yield advance


def num_cores() -> int:
    """Return the number of cores this process may use.

    Unlike `os.cpu_count()` it respects the limits of a container or scheduler, on Linux.
    """
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
