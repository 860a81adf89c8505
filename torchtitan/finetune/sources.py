"""Find the examples that a job names, read them and label their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone
from torchtitan.base.log import plural
from torchtitan.data.corpus import Files
from torchtitan.data.files import find_all
from torchtitan.data.readers import check_each, read_each
from torchtitan.finetune.encoder import Encoder, Numbers, WrittenSpecialTokenError
from torchtitan.finetune.examples import Example, check_has_rows, read_examples
from torchtitan.finetune.synthetic import SyntheticExamples

if TYPE_CHECKING:
    from torchtitan.data.settings import TrainingConfig

ENCODED_AT_ONCE = 64


class FileExamples(Files):
    """The examples in files."""

    def examples(self) -> Iterator[Example]:
        """Check the start of all files, then yield their examples."""
        check_each(self.files, check_has_rows)
        yield from read_each(self.files, read_examples)


ExampleFiles = FileExamples | SyntheticExamples


def find_examples(
    training: TrainingConfig, *, held_out: bool = False, once: Once = alone
) -> ExampleFiles:
    """Return the examples that `[training]` names, unread."""
    if training.dataset != "examples":
        return SyntheticExamples(held_out=held_out)
    found = find_all(training.paths, cache=training.dataset_cache, once=once)
    return FileExamples(tuple(file for files in found for file in files))


def label_all(source: ExampleFiles, encoder: Encoder) -> Iterator[tuple[Example, Numbers]]:
    """Yield each example with its numbers.

    Raises:
        DataError: An example or the template is wrong, or examples name special tokens.
    """
    examples = source.examples()
    try:
        while batch := [*islice(examples, ENCODED_AT_ONCE)]:
            yield from zip(batch, encoder.encode(batch), strict=True)
    except WrittenSpecialTokenError as error:
        raise count_written(source, encoder) from error


def count_written(source: ExampleFiles, encoder: Encoder) -> DataError:
    """Return the error for the examples whose text names a special token, with their number."""
    named = ((example.where, encoder.written_token(example)) for example in source.examples())
    found = [(where, name) for where, name in named if name is not None]
    where, name = found[0]
    rule = (
        f'must be "encode" if special tokens in the text of examples are meant as tokens, got '
        f'"refuse"; else remove them. {plural(len(found), "example")} of {source.name} '
        f"{'has' if len(found) == 1 else 'have'} some, {where} the first: {name!r}"
    )
    return DataError.at("special_tokens_in_examples", rule)
