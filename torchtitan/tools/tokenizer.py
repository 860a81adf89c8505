"""Train a byte-pair tokenizer on text and write it as a folder of Hugging Face.

    torchtitan tokenizer my_tokenizer --vocab_size 32000 'corpus/**/*.txt'

Without files it trains on the Python standard library, as for the built-in `bpe_2048`. The last two
ids are a BOS and an EOS token. The package `tokenizers` does the training, with the split pattern
of Llama 3.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torchtitan.base.files import replace_text
from torchtitan.base.urls import local_path
from torchtitan.data.corpus import stdlib_corpus
from torchtitan.data.tokenizer import BEGIN_OF_TEXT, END_OF_TEXT, LLAMA3_PATTERN
from torchtitan.tools.prepare import find_corpus
from torchtitan.tools.verbs import at_least, build_parser, report_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = (BEGIN_OF_TEXT, END_OF_TEXT)
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BEGIN_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
}


def train(texts: Iterator[str], *, vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer of `vocab_size` ids, fewer if the text has fewer merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([*SPECIAL])
    return tokenizer


@report_errors
def main(argv: Sequence[str]) -> int:
    """Train, write the folder and return 0; return 2 for a user's mistake."""
    parser = build_parser("tokenizer", __doc__)
    add = parser.add_argument
    add("output", type=local_path, help="folder to write")
    add("files", nargs="*", help="files or globs, as in training.dataset_path")
    text, size = "ids, including BOS and EOS (2048)", at_least(256 + len(SPECIAL))
    add("--vocab_size", type=size, default=2048, help=text)
    add("--text_key", default="text", help="as training.dataset_text_key")
    args = parser.parse_intermixed_args(argv)
    folder = args.output
    if folder.exists() and not folder.is_dir():
        parser.error(f"output must be a folder, got {folder}")
    corpus = stdlib_corpus()
    if args.files:
        corpus = find_corpus(args.files, text_key=args.text_key)
    sys.stderr.write(f"training on {corpus.name}\n")
    tokenizer = train((piece.text for piece in corpus.pieces()), vocab_size=args.vocab_size)
    for name, content in (
        ("tokenizer_config.json", json.dumps(CONFIG, indent=1)),
        ("tokenizer.json", tokenizer.to_str()),
    ):
        replace_text(folder / name, content)
    num_ids = tokenizer.get_vocab_size()
    options = f"--model.tokenizer_path {shlex.quote(str(folder))} --model.vocab_size {num_ids}"
    sys.stdout.write(f"{folder}: {num_ids} ids, the last two BOS and EOS\ntrain with {options}\n")
    return 0
