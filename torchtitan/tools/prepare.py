"""Tokenize files into a token store, for training on any machine.

    torchtitan prepare data/corpus 'text/**/*.jsonl.zst' --tokenizer tokenizer.model

writes `data/corpus.bin` and `data/corpus.idx` in Megatron-LM's format. Train with
`training.dataset = "files"` and `training.dataset_path = ["data/corpus"]`. The trainer also
tokenizes text itself; prepare it if that takes so long that expensive machines would wait for it.

One process reads and writes, several tokenize. To resume after an interruption, prepare a large
corpus in several stores, and name them all in `dataset_path`.
"""

from __future__ import annotations

import glob
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torchtitan.base.errors import DataError
from torchtitan.base.log import plural
from torchtitan.base.urls import is_url
from torchtitan.data.corpus import Corpus, file_corpus
from torchtitan.data.files import divide, find_files, locked
from torchtitan.data.prepare import num_cores, prepare_files
from torchtitan.data.settings import template_parts
from torchtitan.data.store import STORE_SUFFIXES, TEMPORARY
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.tools.verbs import at_least, build_parser, report_errors

LARGE_BYTES = 1 << 28
"""Size of files from which on processes, which take a second to start, beat threads."""


def find_corpus(patterns: Sequence[str], *, text_key: str, template: str | None = None) -> Corpus:
    """Return the files of all patterns, which are entries of `training.dataset_path`; raise
    DataError if no file matches, or one is a token store."""
    matches = (file for pattern in patterns for file in find_files(pattern, key="files"))
    files, stores = divide(matches)
    if stores:
        raise DataError(f"{stores[0]} is a token store; name text files")
    if template is not None:
        try:
            template_parts(template)
        except ValueError as error:
            raise DataError(f"--text_template: {error}") from error
    return file_corpus(files, text_key, template)


@report_errors
def main(argv: Sequence[str]) -> int:
    """Write the store and return 0; return 2 for a user's mistake, 130 after Ctrl-C."""
    parser = build_parser("prepare", __doc__)
    add = parser.add_argument
    add("prefix", help="path of the store, without .bin and .idx")
    add("files", nargs="+", help="files or globs, as in training.dataset_path")
    add("--tokenizer", required=True, help="as model.tokenizer_path")
    add("--text_key", default="text", help="as training.dataset_text_key")
    add("--text_template", help="as training.dataset_text_template")
    text = "part of the documents that goes to a second store, as validation.holdout_fraction"
    add("--holdout_fraction", type=float, help=text)
    text = "processes; 0: one per core if the files are large"
    add("--workers", type=at_least(0), default=0, help=text)
    args = parser.parse_args(argv)
    prefix = os.path.expanduser(args.prefix)
    is_folder = prefix.endswith("/") or Path(prefix).is_dir()
    if is_url(prefix) or Path(prefix).suffix in STORE_SUFFIXES or is_folder:
        parser.error(f"prefix must be a path without .bin and .idx, and no folder, got {prefix!r}")
    if args.holdout_fraction is not None and not 0 < args.holdout_fraction < 1:
        parser.error(f"--holdout_fraction must be between 0 and 1, got {args.holdout_fraction}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus = find_corpus(args.files, text_key=args.text_key, template=args.text_template)
    is_large = sum(file.stat().st_size for file in corpus.files) >= LARGE_BYTES
    tokenizer, target = build_tokenizer(args.tokenizer, key="--tokenizer"), Path(prefix)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    with locked(lock), ExitStack() as stack:
        stack.callback(lock.unlink)
        for file in target.parent.glob(f"{glob.escape(target.name)}.*{TEMPORARY}*"):
            file.unlink()  # of a process that was killed
        done = prepare_files(
            corpus,
            prefix=prefix,
            tokenizer=tokenizer,
            holdout_fraction=args.holdout_fraction,
            num_processes=args.workers or (num_cores() if is_large else 1),
        )
    counts = [plural(done[f"num_{noun}s"], noun) for noun in ("document", "token")]
    held_out = f", {done['num_held_out']} held out" if args.holdout_fraction is not None else ""
    ratio = done["text_bytes"] / done["num_tokens"]
    sys.stdout.write(
        f"{prefix}.bin, .idx: {counts[0]}{held_out}, {counts[1]}\n"
        f"{done['text_bytes'] / 1e6:.1f} MB of text, {ratio:.2f} bytes per token\n"
    )
    return 0
