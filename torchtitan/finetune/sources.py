"""Find the examples that a job names, read them and label their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone
from torchtitan.data.corpus import Corpus, name_of
from torchtitan.data.files import find_all
from torchtitan.data.holdout import ALL, Holdout
from torchtitan.data.readers import Row, find_mistakes, join_errors, read_rows
from torchtitan.data.settings import PREFERENCES, READS_FILES
from torchtitan.finetune.encoder import Encoder, Numbers
from torchtitan.finetune.examples import Example, parse_answers, parse_pair
from torchtitan.finetune.synthetic import synthetic_examples

if TYPE_CHECKING:
    from torchtitan.data.settings import TrainingConfig

Parse = Callable[..., Sequence[Example]]
"""From a row and `where` it is to its examples."""
ENCODED_AT_ONCE = 64
MAX_CHECKED = 10_000


def find_examples(training: TrainingConfig) -> Corpus:
    """Return the examples that `[training]` names, unread. Its `pieces` are rows."""
    [corpus] = find_sources(replace(training, dataset_weights=()))
    return corpus


def find_sources(
    training: TrainingConfig, *, holdout: Holdout = ALL, once: Once = alone
) -> list[Corpus]:
    """Return the same, in a corpus for each of `dataset_weights`; held out each once, in one."""
    if training.dataset not in READS_FILES:
        pairs = training.dataset in PREFERENCES
        return [synthetic_examples(held_out=holdout.takes_other_text, pairs=pairs)]
    groups = find_all(training.dataset_path, cache=training.dataset_cache, once=once)
    if not training.dataset_weights or holdout.held_out:
        groups = [[file for files in groups for file in files]]
    return [*map(example_files, groups)]


def example_files(files: Sequence[Path]) -> Corpus:
    """Return the examples in files, unread."""
    return Corpus(name_of(files), read_rows, tuple(files))


def parts_of(source: Corpus) -> list[Corpus]:
    """Return the examples of each file."""
    return [replace(source, name=str(file), files=(file,)) for file in source.files] or [source]


def parser_of(training: TrainingConfig) -> Parse:
    """Return what makes the examples of a row, of a pair the chosen and then the rejected one."""
    if training.dataset in PREFERENCES:
        return parse_pair
    return partial(parse_answers, train_on=training.train_on)


def label_all(
    source: Corpus, encoder: Encoder, *, parse: Parse = parse_answers
) -> Iterator[tuple[Example, Numbers]]:
    """Yield each example with its numbers.

    Mistakes in all files and examples are raised together at the end. After the first one at most
    `MAX_CHECKED` examples are read. Raises DataError if files, examples or the template are wrong.
    """
    mistakes = {str(error): error for error in find_mistakes(source.files, source.read)}
    num_left = MAX_CHECKED
    for part in parts_of(source):
        rows = part.pieces()
        try:
            while num_left > 0 and (batch := [*islice(rows, ENCODED_AT_ONCE)]):
                yield from _label(batch, encoder, mistakes, parse=parse)
                num_left -= len(batch) if mistakes else 0
        except DataError as error:  # the rest of this file cannot be read
            mistakes[str(error)] = error
    if mistakes:
        raise join_errors([*mistakes.values()])


def _label(
    batch: Sequence[Row], encoder: Encoder, mistakes: dict[str, DataError], *, parse: Parse
) -> Iterator[tuple[Example, Numbers]]:
    """Yield the examples without a mistake, each with its numbers; add to `mistakes`."""
    try:
        examples = [example for row in batch for example in parse(row.value, where=row.where)]
        numbers = encoder.encode(examples)
    except DataError as error:
        if len(batch) == 1:
            mistakes[str(error)] = error
        else:
            for row in batch:
                yield from _label([row], encoder, mistakes, parse=parse)
        return
    yield from zip(examples, numbers, strict=True)
