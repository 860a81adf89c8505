"""Show the tokens and labels of a job's examples.

    torchtitan preview JOB [--section.key VALUE ...]

Prints the first rows of each file, every token with its label, then how many rows are kept, cut and
dropped, and the seq_len that cuts none. The training's own code makes tokens and labels. Mistakes
in files and rows are reported at the end. A line has a run of tokens with the same label:

    loss   the token is a label: the model learns to write it
    -100   the token is read, and is no label
    cut    the token is beyond seq_len and is not read

All other options are settings of the job, such as --training.seq_len 4096.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.log import plural
from torchtitan.data.readers import join_errors
from torchtitan.data.settings import PREFERENCES, SUPERVISED, TrainingConfig
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.job import Config, load_job
from torchtitan.tools.verbs import at_least, build_parser, report_errors

if TYPE_CHECKING:
    from torchtitan.finetune.data import Fate
    from torchtitan.finetune.encoder import Numbers

DROPPED: tuple[Fate, ...] = ("without an answer", "without one within seq_len", "too long")


@report_errors
def main(argv: Sequence[str]) -> int:
    """Print rows and counts of each file; return the exit code."""
    parser = build_parser("preview", __doc__)
    text = "rows to show of each file (3)"
    parser.add_argument("--rows", type=at_least(0), default=3, help=text)
    parser.add_argument("--ids", action="store_true", help="show the id of each token")
    arguments, settings = parser.parse_known_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    job = load_job(settings)
    with job.wording():
        for line in preview(job.config, num_rows=arguments.rows, with_ids=arguments.ids):
            sys.stdout.write(f"{line}\n")
    return 0


def preview(config: Config, *, num_rows: int, with_ids: bool) -> Iterator[str]:
    """Yield lines about rows and counts of each file of the training data; raise UserError if the
    data are not examples, or the training would refuse them."""
    from torchtitan.finetune.data import build_encoder, fate_of
    from torchtitan.finetune.sources import find_examples, label_all, parser_of, parts_of
    from torchtitan.resume_rules import resolve_model

    config = resolve_model(config)
    training, path = config.training, config.model.tokenizer_path
    if training.dataset not in SUPERVISED or training.dataset in PREFERENCES:
        rule = f'must be "examples" to preview labels, got "{training.dataset}"'
        raise ConfigError.at("training.dataset", rule)
    tokenizer = build_tokenizer(path)
    encoder = build_encoder(training, tokenizer=tokenizer, tokenizer_path=path)
    source = find_examples(training)
    parts = parts_of(source)
    all_fates: list[Fate] = []
    all_lengths: list[int] = []
    mistakes: list[DataError] = []
    for part in parts:
        fates: list[Fate] = []
        lengths: list[int] = []
        try:
            for example, row in label_all(part, encoder, parse=parser_of(training)):
                fates.append(fate_of(row, training))
                lengths.append(len(row))
                if len(lengths) <= num_rows:
                    yield f"{example.where}: {len(row)} tokens, {fates[-1]}"
                    for label, text in runs(row, tokenizer, training, with_ids=with_ids):
                        yield f"  {label:<5} {text}"
        except DataError as error:
            mistakes.append(error)
        yield from summary(part.name, fates, lengths, training)
        all_fates, all_lengths = all_fates + fates, all_lengths + lengths
    if len(parts) > 1:
        yield from summary(source.name, all_fates, all_lengths, training)
    for note, number in encoder.notes.items():
        yield f"{plural(number, 'example')}: {note}"
    if mistakes:
        raise join_errors(mistakes)


def runs(
    row: Numbers, tokenizer: Tokenizer, training: TrainingConfig, *, with_ids: bool
) -> Iterator[tuple[str, str]]:
    """Yield each run of tokens with the same label: the label, and the tokens as text."""

    def label_of(index: int) -> str:
        if index > training.seq_len:
            return "cut"
        return "loss" if row[index] & 1 and index else "-100"  # the first token is never a label

    def text_of(i: int) -> str:
        text = tokenizer.decode([i])
        if "\ufffd" in text:  # a part of a character
            return f"#{i}"
        return f"{text!r}={i}" if with_ids else repr(text)

    for label, indices in groupby(range(len(row)), key=label_of):
        yield label, " ".join(text_of(int(row[index]) >> 1) for index in indices)


def summary(
    name: str, fates: Sequence[Fate], lengths: Sequence[int], training: TrainingConfig
) -> Iterator[str]:
    """Yield the lines about all rows of a file, given their numbers of tokens."""
    counts = Counter(fates)
    dropped = {fate: counts[fate] for fate in DROPPED if counts[fate]}
    reasons = ", ".join(f"{number} {fate}" for fate, number in dropped.items())
    yield (
        f"{name}: {plural(len(lengths), 'row')}, {counts['kept']} kept, {counts['cut']} cut at "
        f"seq_len = {training.seq_len}, {sum(dropped.values())} dropped"
        + (f" ({reasons})" if reasons else "")
    )
    if lengths:
        yield f"  seq_len = {max(lengths) - 1} cuts no row\n"  # the last token is only a label
