"""Tokenise a corpus once, into a store that all ranks and all later runs share.

Threads encode, since tiktoken and `tokenizers` release the interpreter lock while they work (two
threads were measured at 1.8 times one, two processes at 2.0). Processes would have to be started
safely beside CUDA and gloo, would import the user's main module again, and would pickle every text
and every token.

Finished stores are kept in `dataset_cache`, each in a folder named by a fingerprint of what it was
made from. One process of a node writes it under a file lock, in a folder with another name, and
renames that when it is complete. The others wait for the lock and find the store. `cached` does
this for any function that fills a store. With a URL as `dataset_cache` machines share finished
stores: each keeps its own in the default folder, and brings what another has sent. No finished
store is ever deleted: the cache may be emptied by hand whenever no run uses it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from torchtitan.base.cores import num_cores
from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.base.urls import is_url
from torchtitan.data.files import Once, alone, user_path
from torchtitan.data.parts import Advance
from torchtitan.data.source import Corpus, Piece
from torchtitan.data.store import StoreWriter, TokenStore, open_writer
from torchtitan.data.text import Ids
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.urls import bring_folder, local_cache, send_folder

logger = logging.getLogger(__name__)

# part of the fingerprint: raise it when text would be tokenised differently
FORMAT = 1
ABOUT = "about.json"
BATCH_CHARS = 1 << 19
LOG_EVERY_SECONDS = 30.0
# no space, over quota, over the limit of a file
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cached_store(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    cache: str,
    num_threads: int = 0,
    advance: Advance | None = None,
    once: Once = alone,
) -> TokenStore:
    """Return the tokens of a corpus, from the cache or tokenised now, as `tokenize` does.

    `once`: what looks at its files.

    Raises DataError for text that cannot be read, and for a cache that cannot be written.
    """

    def write(writer: StoreWriter) -> dict[str, object]:
        text_bytes = tokenize(
            corpus, tokenizer=tokenizer, writer=writer, num_threads=num_threads, advance=advance
        )
        fingerprint = tokenizer.fingerprint
        return {"source": corpus.name, "tokenizer": fingerprint, "text_bytes": text_bytes}

    store, notes = cached(
        [FORMAT, tokenizer.fingerprint, corpus.name, once(corpus.identity)],
        what=corpus.name,
        cache=cache,
        vocab_size=tokenizer.vocab_size,
        write=write,
    )
    num_tokens, folder = amount(store.num_tokens, "token"), Path(store.prefix).parent
    logger.info("%s: %s in %s", notes["source"], num_tokens, folder)
    return store


def cached(
    parts: Sequence[object],
    *,
    what: str,
    cache: str,
    vocab_size: int,
    write: Callable[[StoreWriter], Mapping[str, object]],
) -> tuple[TokenStore, dict[str, Any]]:
    """Return a store and notes about it, from the cache or made now.

    `write` fills the store and returns the notes; `parts` are all that its content depends on;
    `what` is its name for messages. Raises DataError for a cache that cannot be written.
    """
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    root = user_path(local_cache(cache), key="dataset_cache")
    folder = root / key
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            with _locked(root / f"{key}.lock", what=what):
                # another process may have written it meanwhile
                if not folder.exists():
                    shared = f"{cache.rstrip('/')}/{key}" if is_url(cache) else None
                    _build(folder, vocab_size=vocab_size, write=write, shared=shared)
    except OSError as error:
        what = f"{root}: {error.strerror or error}"
        if error.filename is not None and Path(error.filename) != root:
            what += f" ({error.filename})"
        room = "make room, or " if error.errno in FULL else ""
        rule = f"cannot write tokenised data to {what}; {room}name another folder"
        raise DataError.at("dataset_cache", rule) from error
    return open_cached(folder)


def tokenize(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    writer: StoreWriter,
    num_threads: int = 0,
    advance: Advance | None = None,
) -> int:
    """Write all documents of a corpus, in order, each followed by the end-of-document token.

    Returns the bytes of their text. `num_threads`: 0 takes one for each core. `advance`: what is
    told of bytes read, instead of the terminal or the log.
    """
    num_threads = num_threads or num_cores()
    start = time.monotonic()
    logger.info(
        "tokenising %s (%.1f MB) with %s",
        corpus.name,
        corpus.num_bytes / 1e6,
        amount(num_threads, "thread"),
    )
    end = np.array([tokenizer.eos_id], np.uint32)
    shown = contextlib.nullcontext(advance) if advance else show_progress(corpus)
    text_bytes = 0
    with shown as advance, ThreadPoolExecutor(num_threads) as threads:
        # a few batches ahead keep all threads busy
        waiting: deque[tuple[list[Piece], Future[list[Ids]]]] = deque()
        for batch in _batches(corpus.pieces(advance)):
            texts = [piece.text for piece in batch]
            text_bytes += sum(len(text.encode()) for text in texts)
            waiting.append((batch, threads.submit(tokenizer.encode_batch, texts)))
            if len(waiting) > 2 * num_threads:
                _write(*waiting.popleft(), end=end, writer=writer)
        while waiting:
            _write(*waiting.popleft(), end=end, writer=writer)
    logger.info(
        "%s: %s, %s in %.1f s",
        corpus.name,
        amount(writer.num_documents, "document"),
        amount(writer.num_tokens, "token"),
        time.monotonic() - start,
    )
    return text_bytes


def _write(
    pieces: list[Piece], encoded: Future[list[Ids]], *, end: Ids, writer: StoreWriter
) -> None:
    for piece, ids in zip(pieces, encoded.result(), strict=True):
        tokens = np.concatenate([ids, end]) if piece.ends_document else ids
        writer.add(tokens, ends_document=piece.ends_document)


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


def _build(
    folder: Path,
    *,
    vocab_size: int,
    write: Callable[[StoreWriter], Mapping[str, object]],
    shared: str | None,
) -> None:
    """Write a store, or bring it from the URL `shared`, where another machine may have sent it."""
    unfinished = folder.with_suffix(".tmp")
    # from a process that was killed: this one has the lock
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if shared is not None and _bring(shared, unfinished):
            unfinished.rename(folder)
            return
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
        if shared is not None:
            _send(folder, shared)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _send(folder: Path, url: str) -> None:
    try:
        send_folder(folder, url, last=ABOUT)
    except DataError as error:  # hours of work are here, and this machine needs no more
        logger.warning("%s; other machines have to tokenise it themselves", error)


def _bring(url: str, folder: Path) -> bool:
    """Bring a store that another machine has sent; tell whether there is a whole one."""
    if not bring_folder(url, folder, last=ABOUT):
        return False
    try:
        open_cached(folder)
    except DataError:
        logger.warning("the tokenised data in %s is damaged, and is made anew", url)
        shutil.rmtree(folder)
        return False
    return True


def open_cached(folder: Path) -> tuple[TokenStore, dict[str, Any]]:
    """Open a store of the cache; check that it is as it was written."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        store = TokenStore(folder / "tokens")
        whole = store.content_hash() == about["content"]
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        raise DataError(f"the tokenised data in {folder} is damaged; delete it: {error}") from error
    if not whole:
        raise DataError(f"the tokenised data in {folder} changed since it was written; delete it")
    return store, about


@contextlib.contextmanager
def _locked(file: Path, *, what: str) -> Iterator[None]:
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("waiting for the process that tokenises %s", what)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def show_progress(corpus: Corpus) -> Iterator[Advance]:
    """Yield a function to call with bytes read: a bar on a terminal, else lines in the log."""
    total = corpus.num_bytes
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"tokenising {corpus.name}", total=total)
            yield lambda num_bytes: bar.advance(task, num_bytes)
        return
    done, logged = 0, time.monotonic()

    def advance(num_bytes: int) -> None:
        nonlocal done, logged
        done += num_bytes
        if time.monotonic() - logged >= LOG_EVERY_SECONDS:
            logged = time.monotonic()
            percent = 100 * done / max(total, 1)
            logger.info("tokenising %s: %.0f %% read", corpus.name, percent)

    yield advance
