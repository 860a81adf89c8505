"""The cache of tokenized data, which all ranks and later runs share.

Finished stores are kept in `dataset_cache`, each in a folder named by a fingerprint of its sources.
One process per node writes the store under a file lock, in a temporary folder that is renamed when
the store is complete. The other processes wait for the lock and find the store. `cached` does this
for any function that fills a store, `cached_store` for a corpus (`prepare.py`). Finished stores are
never deleted: the cache may be emptied by hand while no run uses it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone, user_path
from torchtitan.base.log import plural
from torchtitan.data.corpus import Corpus
from torchtitan.data.store import TokenStore
from torchtitan.data.store_writer import StoreWriter, open_writer
from torchtitan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# part of the fingerprint: raise it if the same text gets other tokens
FORMAT = 2
ABOUT = "about.json"


def cached_store(
    corpus: Corpus,
    *,
    tokenizer: Tokenizer,
    cache: str,
    num_threads: int = 0,
    once: Once = alone,
) -> TokenStore:
    """Return the tokens of a corpus, from the cache or tokenized now.

    Args:
        corpus: Text to tokenize.
        tokenizer: Encodes the text.
        cache: Folder of finished stores.
        num_threads: Threads that encode; 0 for one per core.
        once: Reads the identity of the corpus in one process of this machine.

    Raises:
        DataError: Text cannot be read, or the cache cannot be written.
    """

    def write(writer: StoreWriter) -> dict[str, object]:
        from torchtitan.data.prepare import tokenize  # a run finds its data in the cache

        text_bytes = tokenize(corpus, tokenizer=tokenizer, writer=writer, num_threads=num_threads)
        fingerprint = tokenizer.fingerprint
        return {"source": corpus.name, "tokenizer": fingerprint, "text_bytes": text_bytes}

    store, notes = cached(
        [FORMAT, tokenizer.fingerprint, corpus.name, once(corpus.identity)],
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
    cache: str,
    vocab_size: int,
    write: Callable[[StoreWriter], Mapping[str, object]],
) -> tuple[TokenStore, dict[str, Any]]:
    """Return a store and the notes stored with it, from the cache or written now.

    Args:
        sources: Everything that decides the content, as JSON.
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
            with FileLock(root / f"{key}.lock"):
                # another process may have written it meanwhile
                if not folder.exists():
                    _build(folder, vocab_size=vocab_size, write=write)
    except OSError as error:
        rule = f"cannot write tokenized data to {root}: {error.strerror or error}"
        if error.filename is not None and Path(error.filename) != root:
            rule += f" ({error.filename})"
        raise DataError.at("dataset_cache", rule) from error
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
