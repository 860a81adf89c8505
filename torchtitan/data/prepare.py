"""Documents to tokens to a store: once, in parallel, kept in a cache.

Finished stores are kept in `dataset_cache`, each in a folder named by a hash of its files,
the tokenizer, and the fraction of documents that are held out. One process per machine writes the
store under a lock while other processes wait. Finished stores are never deleted: the cache
may be emptied by hand while no run uses it.

Text is read and written in order by one process, and encoded in batches: by the threads of a run
(tiktoken and `tokenizers` release the interpreter lock while they encode), or by the processes of
`torchtitan prepare`. A run starts no processes, which would have to be started safely beside CUDA
and gloo.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone, user_path
from torchtitan.base.log import plural
from torchtitan.data.corpus import Corpus
from torchtitan.data.files import locked
from torchtitan.data.holdout import ALL, HELD_OUT, Holdout, goes_to_holdout, held_out_prefix
from torchtitan.data.readers import find_mistakes, join_errors
from torchtitan.data.store import TokenStore, hash_files, open_writer
from torchtitan.data.text import Ids, Piece, cut_point
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.data.workers import end_with_parent

logger = logging.getLogger(__name__)

FORMAT = 3
"""Part of the cache's keys: raise it if the same text gets other tokens."""
ABOUT = "about.json"
BATCH_CHARS = 1 << 19
PIECE_CHARS, DOCUMENT_CHARS = 1 << 20, 1 << 22
"""Longest text that is encoded at once, and longest document for a tokenizer that needs full
documents. Encoding takes up to 130 times the text's memory."""
LOG_EVERY_SECONDS = 30.0


def cached_store(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    cache: str,
    holdout: Holdout = ALL,
    once: Once = alone,
) -> TokenStore:
    """Return the tokens of a corpus, or of one side of it, from the cache or tokenized now.

    `holdout` has the fraction that is held out, and the side to return. `once` reads the identity
    of the corpus in one process of this machine. Raises DataError if text cannot be read, the cache
    cannot be written, or the side has no document.
    """
    fraction = holdout.fraction
    folder, notes = cached(
        [FORMAT, tokenizer.fingerprint, corpus.name, once(corpus.identity), fraction],
        cache=cache,
        build=lambda folder: prepare_files(
            corpus, prefix=f"{folder}/tokens", tokenizer=tokenizer, holdout_fraction=fraction
        ),
    )
    prefix = str(folder / "tokens")
    held_out = f"{notes['num_held_out']} of {plural(notes['num_documents'], 'document')}"
    if fraction is not None and holdout.held_out:
        prefix = held_out_prefix(prefix, fraction)
    if not Path(f"{prefix}.idx").exists():
        raise holdout.too_small(f"{held_out} of {corpus.name} are held out")
    store = TokenStore(prefix)
    logger.info("%s: %s in %s", corpus.name, plural(store.num_tokens, "token"), folder)
    if fraction is not None and not holdout.held_out:
        logger.info("%s: validation.holdout_fraction holds out %s", corpus.name, held_out)
    return store


def prepare_files(
    corpus: Corpus,
    *,
    prefix: str,
    tokenizer: Tokenizer,
    holdout_fraction: float | None = None,
    num_processes: int = 1,
) -> dict[str, Any]:
    """Write the store `prefix`, and with a fraction the store of the documents held out.

    `prefix` is the path of the store without suffixes. An end token follows each document. One
    process has a thread per core.

    Returns:
        Name and tokenizer; counts of documents, of those held out, of tokens and of bytes of text.

    Raises DataError if a file cannot be read. Earlier stores are kept. Raises OSError if the disk
    is full. Earlier stores may be gone, never mixed with new ones.
    """
    if mistakes := find_mistakes(corpus.files, corpus.read):
        raise join_errors(mistakes)
    fraction, end = holdout_fraction, np.array([tokenizer.eos_id], np.uint32)
    prefixes = [prefix, *([] if fraction is None else [held_out_prefix(prefix, fraction)])]
    counts = Counter(num_documents=0, num_held_out=0, num_tokens=0, text_bytes=0)
    document: list[Ids] = []
    logged_at = time.monotonic()
    with ExitStack() as stack:
        writers = [
            stack.enter_context(open_writer(prefix, vocab_size=tokenizer.vocab_size))
            for prefix in prefixes
        ]
        pool = stack.enter_context(_start_pool(num_processes))
        for piece, ids in _encode(
            corpus, tokenizer, pool, num_ahead=2 * max(num_cores(), num_processes)
        ):
            counts["text_bytes"] += len(piece.text.encode())
            document.append(ids)
            if fraction is not None and not piece.ends_document:
                continue  # the hash needs the full document
            ids = np.concatenate(document)
            document.clear()
            is_held_out = fraction is not None and goes_to_holdout(ids, fraction)
            if piece.ends_document:
                ids = np.concatenate([ids, end])
            writers[is_held_out].add(ids, ends_document=piece.ends_document)
            counts["num_documents"] += piece.ends_document
            counts["num_held_out"] += is_held_out
            counts["num_tokens"] += len(ids)
            if time.monotonic() - logged_at >= LOG_EVERY_SECONDS:
                logged_at = time.monotonic()
                logger.info("%s: %.1f MB of text", corpus.name, counts["text_bytes"] / 1e6)
        # no index of an earlier store may meet new tokens, or documents that are held out now
        target = Path(prefix)
        target.with_name(f"{target.name}.idx").unlink(missing_ok=True)
        for file in target.parent.glob(f"{glob.escape(target.name)}{HELD_OUT}[0-9]*.idx"):
            file.unlink()
            file.with_suffix(".bin").unlink(missing_ok=True)
    return {"source": corpus.name, "tokenizer": tokenizer.fingerprint, **counts}


def cached(
    sources: Sequence[object], *, cache: str, build: Callable[[Path], Mapping[str, object]]
) -> tuple[Path, dict[str, Any]]:
    """Return a folder of the cache and the notes stored in it, from the cache or built now.

    `sources` is everything that decides the content, as JSON; `build` fills an empty folder and
    returns the notes. Raises DataError if the cache cannot be written, or is damaged.
    """
    root = user_path(cache, key="dataset_cache")
    folder = root / hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:32]
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            with locked(folder.with_suffix(".lock")):
                if not folder.exists():  # another process may have written it meanwhile
                    _build(folder, build)
    except OSError as error:
        rule = f"cannot write to {error.filename or root}: {error.strerror or error}"
        raise DataError.at("dataset_cache", rule) from error
    return folder, read_notes(folder)


def _build(folder: Path, build: Callable[[Path], Mapping[str, object]]) -> None:
    unfinished = folder.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir()
    try:
        notes = {**build(unfinished), "content": hash_files(_content(unfinished))}
        (unfinished / ABOUT).write_text(json.dumps(notes, indent=1) + "\n")
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def read_notes(folder: Path) -> dict[str, Any]:
    """Return the notes in a folder of the cache, after checking that its files are unchanged."""
    try:
        notes: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        is_unchanged = hash_files(_content(folder)) == notes["content"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the tokenized data in {folder} is damaged; delete it: {error}") from error
    if not is_unchanged:
        raise DataError(f"the tokenized data in {folder} changed since it was written; delete it")
    return notes


def _content(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name != ABOUT and file.is_file())


def _start_pool(num_processes: int) -> Executor:
    if num_processes == 1:
        return ThreadPoolExecutor(num_cores())
    # not forked: threads of this process may hold locks
    return ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), initializer=_init_process
    )


def _init_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
    end_with_parent()


def _encode(
    corpus: Corpus, tokenizer: Tokenizer, pool: Executor, *, num_ahead: int
) -> Iterator[tuple[Piece, Ids]]:
    """Yield pieces of documents with their ids, in order."""
    limit = PIECE_CHARS if tokenizer.encodes_pieces else DOCUMENT_CHARS
    # a few batches ahead keep the pool busy
    pending: deque[tuple[list[Piece], Future[list[Ids]]]] = deque()

    def finish_first() -> Iterator[tuple[Piece, Ids]]:
        pieces, encoded = pending.popleft()
        try:
            yield from zip(pieces, encoded.result(), strict=True)
        except BrokenProcessPool as error:
            raise DataError(
                "a process ended, perhaps out of memory; try fewer --workers"
            ) from error

    for batch in _batches(_cut(corpus.pieces(), limit=limit)):
        texts = [piece.text for piece in batch]
        pending.append((batch, pool.submit(tokenizer.encode_batch, texts)))
        if len(pending) > num_ahead:
            yield from finish_first()
    while pending:
        yield from finish_first()


def _cut(pieces: Iterator[Piece], *, limit: int) -> Iterator[Piece]:
    """Join the pieces of each document, and cut it into pieces of at most `limit` characters."""
    text = ""
    for piece in pieces:
        text += piece.text
        while len(text) > limit:
            cut = cut_point(text, limit=limit)
            yield Piece(text[:cut], ends_document=False, where=piece.where)
            text = text[cut:]
        if piece.ends_document:
            yield Piece(text, ends_document=True, where=piece.where)
            text = ""


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


def num_cores() -> int:
    """Return the number of cores this process may use.

    Unlike `os.cpu_count()` it respects the limits of a container or scheduler, on Linux.
    """
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
