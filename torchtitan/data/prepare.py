"""Tokenize a corpus into a store.

Threads encode, since tiktoken and `tokenizers` release the interpreter lock while they work (two
threads were measured at 1.8 times one, two processes at 2.0). Processes would have to be started
safely beside CUDA and gloo, would import the user's main module again, and would pickle every text
and every token.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import numpy as np

from torchtitan.base.log import plural
from torchtitan.data.corpus import Corpus
from torchtitan.data.store_writer import StoreWriter
from torchtitan.data.text import Advance, Ids, Piece
from torchtitan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BATCH_CHARS = 1 << 19
LONGEST_CHARS = 1 << 22
"""Characters up to which a document is encoded whole if it must be. Encoding takes 120 times that
in bytes."""
LOG_EVERY_SECONDS = 30.0


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
