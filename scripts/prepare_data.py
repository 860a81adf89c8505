"""Tokenise files once into a token store, to train from on any machine.

    python scripts/prepare_data.py data/corpus 'text/**/*.jsonl.zst' --tokenizer tokenizer.model

writes `data/corpus.bin` and `data/corpus.idx` in Megatron-LM's format. Train with
`training.dataset = "files"` and `training.dataset_path = ["data/corpus"]`. The trainer tokenises
text by itself; do it beforehand when that takes long, so that no expensive machine waits for it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without being installed

from torchtitan.base.errors import DataError, UserError
from torchtitan.base.log import amount
from torchtitan.data.files import divide, find_files
from torchtitan.data.formats import STORES
from torchtitan.data.prepare import tokenize
from torchtitan.data.source import FileCorpus
from torchtitan.data.store import open_writer
from torchtitan.data.tokenizer import build_tokenizer


def prepare(patterns: Sequence[str], *, prefix: str, tokenizer_path: str, text_key: str) -> str:
    """Write the store `prefix` from the files of all patterns; return a line about it."""
    if Path(prefix).suffix in STORES or prefix.endswith("/") or Path(prefix).is_dir():
        raise DataError(
            f"prefix must be a path without .bin and .idx, and no folder, got {prefix!r}; write "
            f"one such as data/corpus"
        )
    found = (file for pattern in patterns for file in find_files(pattern, key="files"))
    files, stores = divide(found)
    if stores:
        raise DataError(f"{stores[0]} is a token store already; name text files")
    tokenizer = build_tokenizer(tokenizer_path, key="--tokenizer")
    with open_writer(prefix, vocab_size=tokenizer.vocab_size) as writer:
        corpus = FileCorpus(files, text_key, settings=("--text_key", ""))
        tokenize(corpus, tokenizer=tokenizer, writer=writer)
    documents = amount(writer.num_documents, "document")
    return f"{prefix}.bin, .idx: {documents}, {amount(writer.num_tokens, 'token')}"


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and write the store."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", help="path of the store, without .bin and .idx")
    parser.add_argument("files", nargs="+", help="text or JSON Lines files, globs, .gz, .zst")
    parser.add_argument("--tokenizer", required=True, help="as model.tokenizer_path")
    parser.add_argument("--text_key", default="text", help="key of a JSON object's text")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        line = prepare(
            args.files,
            prefix=os.path.expanduser(args.prefix),  # as of the files
            tokenizer_path=args.tokenizer,
            text_key=args.text_key,
        )
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(line)


if __name__ == "__main__":
    main()
