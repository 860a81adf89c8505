"""Train a byte-pair tokenizer on text and write it as a tiktoken file.

    python -m torchtitan tokenizer my.tiktoken --vocab_size 32000 'corpus/**/*.txt'

Without files it trains on the Python standard library, as for the built-in `bpe_2048`. Two ids of
the vocabulary are the BOS and EOS tokens that `TiktokenTokenizer` adds to each file. The package
`tokenizers` does the training, with the split pattern of Llama 3.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.base.urls import local_path
from torchtitan.data.corpus import stdlib_corpus
from torchtitan.data.tokenizer import LLAMA3_PATTERN
from torchtitan.tools.prepare import find_corpus
from torchtitan.tools.verbs import build_parser, report_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_SPECIAL = 2


def train(texts: Iterator[str], *, vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer of `vocab_size` ids minus the special tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - NUM_SPECIAL,
        initial_alphabet=alphabet,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokens_by_rank(tokenizer: Tokenizer) -> list[bytes]:
    """Return the tokens in merge order, after the 256 single bytes."""
    byte_of = byte_letters()
    ids: dict[str, int] = tokenizer.get_vocab()
    return [
        bytes(byte_of[letter] for letter in token) for token in sorted(ids, key=ids.__getitem__)
    ]


def byte_letters() -> dict[str, int]:
    """Return the byte of each letter in a byte-level vocabulary.

    In GPT-2's convention, the letter of a byte is its Latin-1 character if that is printable. Other
    bytes have the letters from U+0100.
    """
    printable = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace()]
    hidden = [b for b in range(256) if b not in printable]
    return {
        **{chr(b): b for b in printable},
        **{chr(256 + i): b for i, b in enumerate(hidden)},
    }


def write_tiktoken(file: Path, tokens: Sequence[bytes]) -> None:
    """Write tokens in tiktoken's format. An existing file is replaced at the end, atomically."""
    temporary = file.with_name(file.name + ".tmp")
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    temporary.write_bytes(b"".join(lines))
    temporary.replace(file)


@report_errors
def main(argv: Sequence[str]) -> int:
    """Train, write the file and return 0; return 2 for a user's mistake."""
    parser = build_parser("tokenizer", __doc__)
    parser.add_argument("output", type=local_path, help="file to write")
    parser.add_argument("files", nargs="*", help="files or globs, as in training.dataset_path")
    parser.add_argument(
        "--vocab_size", type=int, default=2048, help="ids, including BOS and EOS (2048)"
    )
    parser.add_argument("--text_key", default="text", help="as training.dataset_text_key")
    args = parser.parse_intermixed_args(argv)
    if args.vocab_size < 256 + NUM_SPECIAL:
        parser.error(f"--vocab_size must be at least {256 + NUM_SPECIAL}, got {args.vocab_size}")
    if args.output.is_dir() or not args.output.absolute().parent.is_dir():
        parser.error(f"output must be a file in an existing folder, got {args.output}")
    corpus = stdlib_corpus()
    if args.files:
        corpus = find_corpus(args.files, text_key=args.text_key)
    texts = (piece.text for piece in corpus.pieces())
    tokens = tokens_by_rank(train(texts, vocab_size=args.vocab_size))
    write_tiktoken(args.output, tokens)
    sys.stdout.write(f"{args.output}: {len(tokens)} tokens and {NUM_SPECIAL} special ones\n")
    return 0
