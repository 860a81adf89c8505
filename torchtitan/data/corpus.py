"""Corpora: text that can be read repeatedly, always the same.

`python_stdlib` is real text that every machine with Python has: about 12 MB of code, comments and
documentation, enough to see a small model learn; it differs between Python versions. `synthetic`
(`synthetic.py`) is the same text on every machine, to compare runs and to test.

The identity of a corpus comes from its files (path, size, times): on this machine, it tells whether
they have changed since they were tokenized.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torchtitan.base.errors import DataError
from torchtitan.data.files import file_identity
from torchtitan.data.readers import TextTemplate, read_documents

# tests are large and odd; installed packages are not the standard library
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text that can be read repeatedly, always the same."""

    name: str
    """Name in messages."""
    read: Callable[..., Iterator[Any]]
    """Yields the documents of a file in pieces; without files, all documents."""
    files: tuple[Path, ...] = ()
    key: list[str] = field(default_factory=list)
    """Values that decide the text besides the files."""

    def identity(self) -> list[str]:
        """Return values that change whenever the text may have changed."""
        return [*map(file_identity, self.files), *self.key]

    def pieces(self) -> Iterator[Any]:
        """Yield what `read` yields for each file in turn."""
        if not self.files:
            return self.read()
        return chain.from_iterable(map(self.read, self.files))


def file_corpus(
    files: tuple[Path, ...], text_key: str = "text", template: str | None = None
) -> Corpus:
    """Return the documents of files of any format.

    The text of a row is the value under `text_key`, or the `template` with keys in braces.
    """
    read = partial(read_documents, text_of=TextTemplate(text_key, template))
    key = [text_key, *([] if template is None else [template])]
    return Corpus(name_of(files), read, files, key)


def name_of(files: Sequence[Path]) -> str:
    """Return a name of files for messages."""
    return str(files[0]) if len(files) == 1 else f"{len(files)} files"


def stdlib_corpus() -> Corpus:
    """Return the `.py` files of the running Python's standard library, sorted by path; raise
    DataError if this Python has no source files, for example because they are zipped."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED]  # os.walk skips the rest
        # _sysconfigdata holds the paths of the machine that built this Python
        names = [n for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
        paths = (Path(folder, name) for name in names)
        files += [path for path in paths if path.is_file() and path.stat().st_size > 0]
    if not files:
        raise DataError.at("dataset", f"python_stdlib needs sources, {root} holds none")
    return replace(file_corpus(tuple(sorted(files, key=Path.as_posix))), name="python_stdlib")
