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

import numpy as np

from torchtitan.base.log import plural
from torchtitan.data.corpus import Corpus
from torchtitan.data.store_writer import StoreWriter
from torchtitan.data.text import Ids, Piece
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
) -> int:
    """Write all documents of a corpus in order, each followed by the end-of-document token.

    Logs the progress every 30 seconds.

    Args:
        corpus: Text to tokenize.
        tokenizer: Encodes the text.
        writer: Receives the tokens.
        num_threads: Threads that encode; 0 for one per core.

    Returns:
        The size of the text in bytes.
    """
    num_threads = num_threads or num_cores()
    start = time.monotonic()
    size, threads = corpus.num_bytes / 1e6, plural(num_threads, "thread")
    logger.info("tokenizing %s (%.1f MB) with %s", corpus.name, size, threads)
    end = np.array([tokenizer.eos_id], np.uint32)
    text_bytes, logged_at = 0, start
    with ThreadPoolExecutor(num_threads) as pool:
        # a few batches ahead keep all threads busy
        pending: deque[tuple[list[Piece], Future[list[Ids]]]] = deque()
        pieces = corpus.pieces()
        for batch in _batches(pieces if tokenizer.encodes_pieces else _documents(pieces)):
            texts = [piece.text for piece in batch]
            text_bytes += sum(len(text.encode()) for text in texts)
            if time.monotonic() - logged_at >= LOG_EVERY_SECONDS:
                logged_at = time.monotonic()
                logger.info("tokenizing %s: %.1f MB of text read", corpus.name, text_bytes / 1e6)
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
    size = 0
    for piece in pieces:
        texts.append(piece.text)
        size += len(piece.text)
        is_long = size >= LONGEST_CHARS and not piece.ends_document
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


def num_cores() -> int:
    """Return the number of cores this process may use.

    Unlike `os.cpu_count()` it respects the limits of a container or scheduler, on Linux.
    """
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
