"""Corpora: text that can be read repeatedly, always the same.

`FileCorpus` reads files of any format. Two corpora need no files. `python_stdlib` is real text that
every machine with Python has: about 12 MB of code, comments and documentation, enough to see a
small model learn; it differs between Python versions. `synthetic` (`synthetic.py`) is the same text
on every machine, to compare runs and to test.

The identity of a corpus is cheap to compute from its files (path, size, times). It is enough to
know, on this machine, that they have not changed since they were tokenized.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from torchtitan.base.errors import DataError
from torchtitan.data.files import file_identity
from torchtitan.data.text import Piece

logger = logging.getLogger(__name__)

# tests are large and odd; installed packages are not the standard library
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Corpus(Protocol):
    """Text that can be read repeatedly, always the same."""

    @property
    def name(self) -> str:
        """Return the name for messages."""

    @property
    def num_bytes(self) -> int:
        """Return the size on disk."""

    def identity(self) -> list[str]:
        """Return values that change whenever the text may have changed."""

    def pieces(self) -> Iterator[Piece]:
        """Yield all text in a fixed order."""


@dataclass(frozen=True)
class Files:
    """Files in a fixed order."""

    files: Sequence[Path]

    @property
    def name(self) -> str:
        """Return the name of the file, or the number of files."""
        return str(self.files[0]) if len(self.files) == 1 else f"{len(self.files)} files"

    @property
    def num_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> list[str]:
        """Return path, size and times of each file."""
        return [*map(file_identity, self.files)]


@dataclass(frozen=True)
class FileCorpus(Files):
    """The documents of files of any format.

    Args:
        files: Files to read, in order.
        text_key: Key that holds the text of a row.
        template: Text with keys in braces, used instead of `text_key` if given.
        settings: Names of `text_key` and `template` in error messages.
    """

    text_key: str
    template: str | None = None
    settings: tuple[str, str] = ("dataset_text_key", "dataset_text_template")

    def identity(self) -> list[str]:
        """Return path, size and times of each file, and the key or template."""
        template = [] if self.template is None else [self.template]
        return [*super().identity(), self.text_key, *template]

    def pieces(self) -> Iterator[Piece]:
        """Check the first bytes of all files, then yield the documents of each."""
        from torchtitan.data.readers import TextTemplate, read_documents, read_each

        setting = self.settings[self.template is not None]
        text_of = TextTemplate(self.text_key, self.template, setting=setting)
        yield from read_each(self.files, partial(read_documents, text_of=text_of))


class StdlibCorpus(Files):
    """The `.py` files of the running Python's standard library, sorted by path.

    Raises:
        DataError: This Python has no source files, for example because they are zipped.
    """

    def __init__(self) -> None:
        super().__init__(_stdlib_files())

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return "python_stdlib"

    def pieces(self) -> Iterator[Piece]:
        """Yield each file as a document. Files with a wrong declared encoding are skipped."""
        for file in self.files:
            try:
                with tokenize.open(file) as handle:
                    text = handle.read()
            except (SyntaxError, UnicodeDecodeError) as error:
                logger.info("skipping %s: %s", file, error)
                text = ""
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror}") from error
            if text:
                yield Piece(text, ends_document=True, where=str(file))


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED]  # os.walk skips the rest
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    # _sysconfigdata holds the paths of the machine that built this Python
    files = [file for file in found if not file.name.startswith("_sysconfigdata")]
    files = sorted(filter(Path.is_file, files), key=Path.as_posix)
    if not files:
        rule = (
            f"'python_stdlib' needs the sources of the standard library, {root} holds none; "
            f"use 'synthetic', or 'files' with dataset_path"
        )
        raise DataError.at("dataset", rule)
    return files
