"""Documents to tokens to a store: once, in parallel, kept in a cache.

Finished stores are kept in `dataset_cache`, each in a folder named by a hash of its files,
the tokenizer, and the fraction of documents that are held out. One process per machine writes the
store under a lock while other processes wait. Finished stores are never deleted: the cache
may be emptied by hand while no run uses it.

A corpus is tokenized in parts, each a store that is joined to the final one at the end. Finished
parts are kept after an interruption. `torchtitan prepare` tokenizes parts in processes, because
reading JSON and writing stores hold the interpreter lock. A run uses one process with a thread per
core (tiktoken and `tokenizers` release the lock while they encode): processes would have to be
started safely beside CUDA and gloo, and would import the user's main module again.
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
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
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
from torchtitan.data.store import StoreWriter, TokenStore, hash_files, open_writer
from torchtitan.data.text import Ids, Piece, cut_point
from torchtitan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FORMAT = 3
"""Part of the cache's keys: raise it if the same text gets other tokens."""
ABOUT = "about.json"
BATCH_CHARS = 1 << 19
PIECE_CHARS, DOCUMENT_CHARS = 1 << 20, 1 << 22
"""Longest text that is encoded at once, and longest document for a tokenizer that needs full
documents. Encoding takes up to 130 times the text's memory."""
LOG_EVERY_SECONDS = 30.0
# small enough that all processes end at about the same time, large enough that a part costs little
MAX_PART_BYTES, NUM_PARTS = 1 << 25, 64


def cached_store(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    cache: str,
    holdout: Holdout = ALL,
    num_processes: int = 1,
    once: Once = alone,
) -> TokenStore:
    """Return the tokens of a corpus, or of one side of it, from the cache or tokenized now.

    Args:
        corpus: Text to tokenize.
        tokenizer: Encodes the text.
        cache: Folder of finished stores.
        holdout: Fraction that is held out, and the side to return.
        num_processes: Processes that tokenize parts of the corpus.
        once: Reads the identity of the corpus in one process of this machine.

    Raises:
        DataError: Text cannot be read, the cache cannot be written, or the side has no document.
    """
    fraction = holdout.fraction
    folder, notes = cached(
        [FORMAT, tokenizer.fingerprint, corpus.name, once(corpus.identity), fraction],
        cache=cache,
        build=lambda folder: _tokenize(folder, corpus, tokenizer, fraction, num_processes),
    )
    prefix = str(folder / "tokens")
    num_held_out, num_documents = notes["num_held_out"], notes["num_documents"]
    if fraction is not None and holdout.held_out:
        prefix = held_out_prefix(prefix, fraction)
    if fraction is not None and num_held_out == num_documents * (not holdout.held_out):
        got = f"none of {plural(num_documents, 'document')} of {corpus.name}"
        raise holdout.too_small(needed="one document", got=got)
    store = TokenStore(prefix)
    logger.info("%s: %s in %s", corpus.name, plural(store.num_tokens, "token"), folder)
    holdout.log(corpus.name, num_held_out, plural(num_documents, "document"))
    return store


def prepare_files(
    corpus: Corpus,
    *,
    prefix: str,
    tokenizer: Tokenizer,
    holdout_fraction: float | None = None,
    num_processes: int = 0,
) -> dict[str, Any]:
    """Write the store `prefix`, and with a fraction the store of the documents held out.

    Args:
        corpus: Files to tokenize.
        prefix: Path of the store without the suffixes.
        tokenizer: Encodes the text.
        holdout_fraction: Fraction of the documents to hold out.
        num_processes: Processes; 0 for one per core. At most one per part.

    Returns:
        Counts of the documents, of those held out, of tokens and of bytes of text.

    Raises:
        DataError: A file cannot be read. Finished parts are kept.
    """
    parts = Path(f"{prefix}.parts")
    parts.parent.mkdir(parents=True, exist_ok=True)
    lock = parts.with_name(f".{parts.name}.lock")  # hidden: data may be read from this folder
    with locked(lock):
        try:
            return _prepare(
                corpus, prefix, parts, tokenizer, Holdout(holdout_fraction), num_processes
            )
        finally:
            lock.unlink()


def _prepare(
    corpus: Corpus,
    prefix: str,
    parts: Path,
    tokenizer: Tokenizer,
    holdout: Holdout,
    num_processes: int,
) -> dict[str, Any]:
    try:
        store = cached_store(
            corpus,
            tokenizer=tokenizer,
            cache=str(parts),
            holdout=holdout,
            num_processes=num_processes or num_cores(),
        )
    except BaseException:
        if not any(parts.glob("*.tmp")):
            shutil.rmtree(parts, ignore_errors=True)
        raise
    folder = Path(store.prefix).parent
    notes: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    # indexes are removed first and written last: new tokens must never meet an old index, nor a
    # store the documents that were held out of an earlier one
    held_out = sorted(parts.parent.glob(f"{glob.escape(Path(prefix).name)}{HELD_OUT}[0-9]*.idx"))
    for index in (Path(f"{prefix}.idx"), *held_out):
        index.unlink(missing_ok=True)
        index.with_suffix(".bin").unlink(missing_ok=True)
    for file in sorted(folder.glob("tokens.*")):  # .bin before .idx
        file.replace(prefix + file.name.removeprefix("tokens"))
    shutil.rmtree(parts)
    return notes


def cached(
    sources: Sequence[object], *, cache: str, build: Callable[[Path], Mapping[str, object]]
) -> tuple[Path, dict[str, Any]]:
    """Return a folder of the cache and the notes stored in it, from the cache or built now.

    Args:
        sources: Everything that decides the content, as JSON.
        cache: Parent of the folder.
        build: Fills a folder, which may hold finished parts, and returns the notes.

    Raises:
        DataError: The cache cannot be written, or is damaged.
    """
    key = _hash(sources)
    root = user_path(cache, key="dataset_cache")
    folder, unfinished = root / key, root / f"{key}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not folder.exists():
            with locked(root / f"{key}.lock"):
                if not folder.exists():  # another process may have written it meanwhile
                    unfinished.mkdir(exist_ok=True)
                    for file in unfinished.glob("**/*.tmp-*"):  # of a process that was killed
                        file.unlink()
                    try:
                        notes = {**build(unfinished), "content": hash_files(_content(unfinished))}
                        (unfinished / ABOUT).write_text(json.dumps(notes, indent=1) + "\n")
                        unfinished.rename(folder)
                    except BaseException:
                        if any(unfinished.glob(f"*/{ABOUT}")):
                            logger.warning("finished parts are kept in %s", unfinished)
                        else:
                            shutil.rmtree(unfinished)
                        raise
    except OSError as error:
        rule = f"cannot write to {error.filename or root}: {error.strerror or error}"
        raise DataError.at("dataset_cache", rule) from error
    return folder, read_notes(folder)


def _hash(values: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


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


def _tokenize(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, fraction: float | None, num_processes: int
) -> dict[str, Any]:
    """Write the store `tokens`, and the store of held-out documents, to a folder; return counts."""
    if mistakes := find_mistakes(corpus.files, corpus.read):
        raise join_errors(mistakes)
    parts = [*_divide(corpus, num_processes)]
    folders = [folder / f"part-{_hash(part.identity())}" for part in parts]
    unfinished = [
        (part, target, tokenizer, fraction)
        for target, part in dict(zip(folders, parts, strict=True)).items()  # files may be repeated
        if not (target / ABOUT).exists()
    ]
    num_processes = min(num_processes, len(unfinished))
    if num_processes > 1:
        _tokenize_in_processes(unfinished, num_processes)
    else:
        for job in unfinished:
            _tokenize_part(*job, num_threads=num_cores())
    notes = [json.loads((target / ABOUT).read_text()) for target in folders]
    total = {key: sum(counts[key] for counts in notes) for key in notes[0]}
    for name, num_documents in (
        ("tokens", total["num_documents"] - total["num_held_out"]),
        (held_out_prefix("tokens", fraction or 0), total["num_held_out"]),
    ):
        if not num_documents:
            continue
        with open_writer(folder / name, vocab_size=tokenizer.vocab_size) as writer:
            for target in folders:  # one store open at a time: each holds several files
                if (target / f"{name}.idx").exists():
                    writer.add_store(TokenStore(target / name))
    for target in set(folders):
        shutil.rmtree(target)
    return {"source": corpus.name, "tokenizer": tokenizer.fingerprint, **total}


def _divide(corpus: Corpus, num_processes: int) -> Iterator[Corpus]:
    """Yield neighbouring files together, up to the size of a part."""
    part_bytes = min(MAX_PART_BYTES, corpus.num_bytes // NUM_PARTS)
    if num_processes == 1:
        part_bytes = 8 * MAX_PART_BYTES  # only to resume
    files: list[Path] = []
    size = 0
    for file in corpus.files:
        files.append(file)
        size += file.stat().st_size
        if size >= part_bytes:
            yield replace(corpus, files=tuple(files))
            files, size = [], 0
    if files or not corpus.files:
        yield replace(corpus, files=tuple(files))


def _tokenize_in_processes(jobs: Sequence[tuple[Any, ...]], num_processes: int) -> None:
    num_threads = max(num_cores() // num_processes, 1)
    # not forked: threads of this process may hold locks
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, spawn, _init_process) as pool:
        futures = [pool.submit(_tokenize_part, *job, num_threads=num_threads) for job in jobs]
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                future.result()
                if 20 * number // len(jobs) > 20 * (number - 1) // len(jobs):  # in steps of 5 %
                    logger.info("%d of %s tokenized", number, plural(len(jobs), "part"))
        except BrokenProcessPool as error:
            raise DataError(
                "a process ended before its work, perhaps out of memory; try fewer --workers"
            ) from error
        finally:
            # running parts finish and are kept
            pool.shutdown(cancel_futures=True)


def _init_process() -> None:
    """End this process without a traceback on SIGINT, and when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _tokenize_part(
    part: Corpus, folder: Path, tokenizer: Tokenizer, fraction: float | None, *, num_threads: int
) -> None:
    """Write the stores of a part, each document followed by the end-of-document token."""
    folder.mkdir(exist_ok=True)
    start = logged_at = time.monotonic()
    end = np.array([tokenizer.eos_id], np.uint32)
    document: list[Ids] = []
    num_cuts = 0
    counts = {"num_documents": 0, "num_held_out": 0, "num_tokens": 0, "text_bytes": 0}
    with ExitStack() as stack:
        writers: dict[bool, StoreWriter] = {}

        def writer_of(is_held_out: bool) -> StoreWriter:
            if is_held_out not in writers:  # only sides with a document have a store
                name = held_out_prefix("tokens", fraction or 0) if is_held_out else "tokens"
                opened = open_writer(folder / name, vocab_size=tokenizer.vocab_size)
                writers[is_held_out] = stack.enter_context(opened)
            return writers[is_held_out]

        for piece, ids in _encode(part, tokenizer, num_threads):
            counts["text_bytes"] += len(piece.text.encode())
            counts["num_documents"] += piece.ends_document
            counts["num_tokens"] += len(ids) + piece.ends_document
            num_cuts += not piece.ends_document
            is_held_out = False
            if fraction is not None:
                document.append(ids)
                if not piece.ends_document:
                    continue
                ids = np.concatenate(document)
                document.clear()
                is_held_out = goes_to_holdout(ids, fraction)
                counts["num_held_out"] += is_held_out
            if piece.ends_document:
                ids = np.concatenate([ids, end])
            writer_of(is_held_out).add(ids, ends_document=piece.ends_document)
            if time.monotonic() - logged_at >= LOG_EVERY_SECONDS:
                logged_at = time.monotonic()
                megabytes = counts["text_bytes"] / 1e6
                logger.info("tokenizing %s: %.1f MB of text", part.name, megabytes)
    draft = folder / f"{ABOUT}.tmp-{os.getpid()}"
    draft.write_text(json.dumps(counts))
    draft.replace(folder / ABOUT)
    if num_cuts and not tokenizer.encodes_pieces:
        logger.warning(
            "%s: documents over %d characters were cut, which may change the tokens at %s",
            part.name,
            DOCUMENT_CHARS,
            plural(num_cuts, "cut"),
        )
    documents, tokens = counts["num_documents"], counts["num_tokens"]
    seconds = time.monotonic() - start
    logger.info(
        "%s: %s, %s in %.1f s",
        part.name,
        plural(documents, "document"),
        plural(tokens, "token"),
        seconds,
    )


def _encode(corpus: Corpus, tokenizer: Tokenizer, num_threads: int) -> Iterator[tuple[Piece, Ids]]:
    """Yield pieces of documents with their ids, encoded by threads."""
    limit = PIECE_CHARS if tokenizer.encodes_pieces else DOCUMENT_CHARS
    with ThreadPoolExecutor(num_threads) as pool:
        # a few batches ahead keep all threads busy
        pending: deque[tuple[list[Piece], Future[list[Ids]]]] = deque()
        for batch in _batches(_cut(corpus.pieces(), limit=limit)):
            texts = [piece.text for piece in batch]
            pending.append((batch, pool.submit(tokenizer.encode_batch, texts)))
            if len(pending) > 2 * num_threads:
                pieces, ids = pending.popleft()
                yield from zip(pieces, ids.result(), strict=True)
        for pieces, ids in pending:
            yield from zip(pieces, ids.result(), strict=True)


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
