"""Tokenise files once into a token store, to train from on any machine.

    python -m torchtitan prepare data/corpus 'text/**/*.jsonl.zst' --tokenizer tokenizer.model

writes `data/corpus.bin` and `data/corpus.idx` in Megatron-LM's format. Train with
`training.dataset = "files"` and `training.dataset_path = ["data/corpus"]`. The trainer tokenises
text by itself; do it beforehand when that takes long, so that no expensive machine waits for it.

Several processes work, a file at a time each; stopped, the same command goes on where it was.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.base.errors import DataError, UserError
from torchtitan.base.urls import is_url
from torchtitan.data.corpus import FileCorpus
from torchtitan.data.files import divide, find_files
from torchtitan.data.prepare_files import prepare_files
from torchtitan.data.settings import template_parts, template_rule
from torchtitan.data.store import STORE_SUFFIXES
from torchtitan.tools.verbs import build_parser


def find_corpus(patterns: Sequence[str], *, text_key: str, template: str | None) -> FileCorpus:
    """Return the files of all patterns; raise DataError if there are none, or stores."""
    found = (file for pattern in patterns for file in find_files(pattern, key="files"))
    files, stores = divide(found)
    if stores:
        raise DataError(f"{stores[0]} is a token store already; name text files")
    if template is not None:
        try:
            template_parts(template)
        except ValueError as error:
            raise DataError(f"--text_template: {template_rule(error)}") from error
    return FileCorpus(files, text_key, template, settings=("--text_key", "--text_template"))


def main(argv: Sequence[str]) -> int:
    """Write the store and return 0; a mistake ends the process with 2."""
    parser = build_parser("prepare", __doc__)
    parser.add_argument("prefix", help="path of the store, without .bin and .idx")
    parser.add_argument("files", nargs="+", help="files or globs, as training.dataset_path")
    parser.add_argument("--tokenizer", required=True, help="as model.tokenizer_path")
    parser.add_argument("--text_key", default="text", help="as training.dataset_text_key")
    parser.add_argument("--text_template", help="as training.dataset_text_template")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one for each core")
    args = parser.parse_args(argv)
    prefix = os.path.expanduser(args.prefix)  # as of the files
    is_folder = prefix.endswith("/") or Path(prefix).is_dir()
    if is_url(prefix) or Path(prefix).suffix in STORE_SUFFIXES or is_folder:
        parser.error(
            f"prefix must be a path without .bin and .idx, and no folder, got {prefix!r}; write "
            f"one such as data/corpus"
        )
    if args.workers < 0:
        parser.error(f"--workers must be 0 or more, got {args.workers}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        corpus = find_corpus(args.files, text_key=args.text_key, template=args.text_template)
        done = prepare_files(
            corpus, prefix=prefix, tokenizer_path=args.tokenizer, num_workers=args.workers
        )
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped\n")
    sys.stdout.write(f"{prefix}.bin, .idx: {done}\n")
    return 0
