"""Find the examples that a job names, read them and label their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone
from torchtitan.data.corpus import Files
from torchtitan.data.files import find_all
from torchtitan.data.readers import (
    MAX_MISTAKES,
    READERS,
    Row,
    check_heads,
    join_errors,
    read_rows,
    suffix_of,
)
from torchtitan.finetune.encoder import Encoder, Numbers, WrittenSpecialTokenError
from torchtitan.finetune.examples import Example, parse_example
from torchtitan.finetune.synthetic import SyntheticExamples

if TYPE_CHECKING:
    from torchtitan.data.settings import TrainingConfig

ENCODED_AT_ONCE = 64
MAX_CHECKED = 10_000


class FileExamples(Files):
    """The examples in files."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all files."""
        for file in self.files:
            yield from read_rows(file)

    def check_start(self) -> None:
        """Raise DataError for a file without rows, or whose content does not fit its suffix."""
        for file in self.files:
            if suffix_of(file) not in READERS:
                raise DataError(
                    f"examples must be in one of {', '.join(READERS)}, got {file}; to train on "
                    f'text set dataset = "files"'
                )
        check_heads(self.files)


ExampleFiles = FileExamples | SyntheticExamples


def find_examples(
    training: TrainingConfig, *, held_out: bool = False, once: Once = alone
) -> ExampleFiles:
    """Return the examples that `[training]` names, unread."""
    if training.dataset != "examples":
        return SyntheticExamples(held_out=held_out)
    found = find_all(training.paths, cache=training.dataset_cache, once=once)
    return FileExamples(tuple(file for files in found for file in files))


def parts_of(source: ExampleFiles) -> Sequence[ExampleFiles]:
    """Return the source of each file."""
    if isinstance(source, FileExamples):
        return [FileExamples((file,)) for file in source.files]
    return [source]


def label_all(source: ExampleFiles, encoder: Encoder) -> Iterator[tuple[Example, Numbers]]:
    """Yield each example with its numbers.

    A mistake is raised at the end, together with those of other files and examples. After the first
    one at most `MAX_CHECKED` examples are read.

    Raises:
        DataError: Files, examples or the template are wrong, or examples name special tokens.
    """
    found: dict[str, DataError] = {}
    readable = []
    for part in parts_of(source):
        try:
            if isinstance(part, FileExamples):
                part.check_start()
            readable.append(part)
        except DataError as error:
            found[str(error)] = error
    num_left = MAX_CHECKED
    for part in readable:
        rows = part.rows()
        try:
            while num_left > 0 and (batch := [*islice(rows, ENCODED_AT_ONCE)]):
                yield from _label(batch, encoder, found)
                num_left -= len(batch) if found else 0
        except DataError as error:  # the rest of this file cannot be read
            found[str(error)] = error
    if found:
        raise _joined([*found.values()], name=source.name)


def _label(
    batch: Sequence[Row], encoder: Encoder, found: dict[str, DataError]
) -> Iterator[tuple[Example, Numbers]]:
    """Yield the examples without a mistake, each with its numbers; add mistakes to `found`."""
    try:
        examples = [parse_example(row.value, where=row.where) for row in batch]
        numbers = encoder.encode(examples)
    except DataError as error:
        if len(batch) == 1:
            found[str(error)] = error
        else:
            for row in batch:
                yield from _label([row], encoder, found)
        return
    yield from zip(examples, numbers, strict=True)


def _joined(errors: Sequence[DataError], *, name: str) -> DataError:
    more = []
    if len(errors) > MAX_MISTAKES:
        more.append(f"and {len(errors) - MAX_MISTAKES} more in {name}")
    if any(isinstance(error, WrittenSpecialTokenError) for error in errors):
        more.append('training.special_tokens_in_examples = "encode" reads names as special tokens')
    return join_errors(errors[:MAX_MISTAKES], more="\n".join(more))
