"""Find the examples that a job names, read them and label their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone
from torchtitan.data.corpus import Corpus
from torchtitan.data.files import find_all
from torchtitan.data.holdout import ALL, Holdout
from torchtitan.data.readers import (
    MAX_MISTAKES,
    READERS,
    Row,
    check_start,
    join_errors,
    read_rows,
    suffix_of,
)
from torchtitan.finetune.encoder import Encoder, Numbers, WrittenSpecialTokenError
from torchtitan.finetune.examples import Example, parse_example
from torchtitan.finetune.synthetic import synthetic_examples

if TYPE_CHECKING:
    from torchtitan.data.settings import TrainingConfig

ENCODED_AT_ONCE = 64
MAX_CHECKED = 10_000


def find_examples(
    training: TrainingConfig, *, holdout: Holdout = ALL, once: Once = alone
) -> Corpus:
    """Return the examples that `[training]` names, unread. Its `read` yields rows."""
    if training.dataset != "examples":
        return synthetic_examples(held_out=holdout.takes_other_text)
    groups = find_all(training.paths, cache=training.dataset_cache, once=once)
    return example_files([file for files in groups for file in files])


def example_files(files: Sequence[Path]) -> Corpus:
    """Return the examples in files, unread."""
    name = str(files[0]) if len(files) == 1 else f"{len(files)} files"
    return Corpus(name, read_rows, tuple(files))


def parts_of(source: Corpus) -> list[Corpus]:
    """Return the examples of each file."""
    return [replace(source, name=str(file), files=(file,)) for file in source.files] or [source]


def rows_of(source: Corpus) -> Iterator[Row]:
    """Yield the rows of all files."""
    for part in parts_of(source):
        yield from part.read(*part.files)


def _check(part: Corpus) -> None:
    """Raise DataError for a file without rows, or whose start does not fit its suffix."""
    for file in part.files:
        if suffix_of(file) not in READERS:
            raise DataError(
                f"examples must be in one of {', '.join(READERS)}, got {file}; to train on text "
                f'set dataset = "files"'
            )
        check_start(file)


def label_all(source: Corpus, encoder: Encoder) -> Iterator[tuple[Example, Numbers]]:
    """Yield each example with its numbers.

    Mistakes in all files and examples are raised together at the end. After the first one at most
    `MAX_CHECKED` examples are read.

    Raises:
        DataError: Files, examples or the template are wrong, or examples name special tokens.
    """
    mistakes: dict[str, DataError] = {}
    parts = []
    for part in parts_of(source):
        try:
            _check(part)  # before the long work
            parts.append(part)
        except DataError as error:
            mistakes[str(error)] = error
    num_left = MAX_CHECKED
    for part in parts:
        rows = rows_of(part)
        try:
            while num_left > 0 and (batch := [*islice(rows, ENCODED_AT_ONCE)]):
                yield from _label(batch, encoder, mistakes)
                num_left -= len(batch) if mistakes else 0
        except DataError as error:  # the rest of this file cannot be read
            mistakes[str(error)] = error
    if mistakes:
        errors = [*mistakes.values()]
        if any(isinstance(error, WrittenSpecialTokenError) for error in errors[:MAX_MISTAKES]):
            setting = 'training.special_tokens_in_examples = "encode"'
            errors.append(DataError(f"{setting} reads names as special tokens"))
        raise join_errors(errors)


def _label(
    batch: Sequence[Row], encoder: Encoder, mistakes: dict[str, DataError]
) -> Iterator[tuple[Example, Numbers]]:
    """Yield the examples without a mistake, each with its numbers; add to `mistakes`."""
    try:
        examples = [parse_example(row.value, where=row.where) for row in batch]
        numbers = encoder.encode(examples)
    except DataError as error:
        if len(batch) == 1:
            mistakes[str(error)] = error
        else:
            for row in batch:
                yield from _label([row], encoder, mistakes)
        return
    yield from zip(examples, numbers, strict=True)
