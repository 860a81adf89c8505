"""Paths and files that a user or another program wrote, and work that a machine does once."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.base.errors import CheckpointError, ConfigError, DataError

Once = Callable[[Callable[[], Any]], Any]
"""Calls a function in one process of this machine and returns its result, a JSON value, in all."""


def alone(work: Callable[[], Any]) -> Any:
    """Call the function in this process."""
    return work()


def user_path(path: str, *, key: str) -> Path:
    """Return the path given by the setting `key`; raise DataError if it cannot be looked up."""
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
    # a name that is too long, a folder without permission; the home of an unknown user
    except (OSError, RuntimeError) as error:
        raise DataError.at(key, f"cannot look for {path!r:.200}: {error}") from error
    return expanded


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError if a name that a run writes in its folder is a symbolic link.

    A folder may come from a stranger, and writing would follow the link out of it.
    """
    for name in names:
        parts = Path(name).parts
        for path in (folder.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)):
            if path.is_symlink() or path.is_fifo():
                rule = (
                    f"must hold no links or pipes at names that the run writes, and {path} is one"
                )
                raise ConfigError.at("job.dump_folder", rule)


def check_is_file(path: Path) -> None:
    """Raise OSError unless `path` is a regular file: opening a pipe blocks, a device never ends."""
    if not path.is_file():
        code = errno.EINVAL if path.exists() else errno.ENOENT
        raise OSError(code, "not a regular file" if path.exists() else os.strerror(code), str(path))


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Return the UTF-8 text of a file; raise OSError as `check_is_file` does."""
    check_is_file(path)
    return path.read_text(encoding="utf-8", errors=errors)


def replace_text(path: Path, text: str) -> None:
    """Write a file whose older content stays if this fails; raises OSError."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)  # a link there is not followed
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def load_json(text: bytes) -> Any:
    """Return a JSON value; raise ValueError also for a lone surrogate, which no text file can hold,
    and RecursionError for a value that is nested too deeply."""
    value = json.loads(text)
    if b"\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


class StoredJSON(dict[str, Any]):
    """A JSON object read from the file `path`; a missing key raises CheckpointError."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self.path} is damaged: it lacks '{key}'; use another checkpoint")

    def __reduce__(self) -> tuple[type[StoredJSON], tuple[Path, dict[str, Any]]]:
        return StoredJSON, (self.path, dict(self))

    def check_types(self, types: Mapping[str, type]) -> StoredJSON:
        """Return self if each present key of `types` has a value of exactly that type; raise
        CheckpointError if a value has another type."""
        for key, cls in types.items():
            if key in self and type(self[key]) is not cls:  # exact: true is an int to isinstance
                raise self._damage(key, f"of type {cls.__name__}")
        return self

    def check_counts(self, *keys: str) -> StoredJSON:
        """Return self if the values of `keys` are counts: integers from 0 to 2^63 - 1; raise
        CheckpointError if a value is out of range."""
        for key in keys:
            if not 0 <= self[key] < 2**63:
                raise self._damage(key, "0 or more and fit into 64 bits")
        return self

    def _damage(self, key: str, rule: str) -> CheckpointError:
        value = str(self[key])[:60]
        return CheckpointError(
            f"{self.path} is damaged: '{key}' must be {rule}, got {value!r}; use another checkpoint"
        )


def read_json(path: Path) -> StoredJSON:
    """Read a JSON object; raise CheckpointError if the file is missing or does not hold a JSON
    object."""
    try:
        check_is_file(path)
        return parse_json(path.read_bytes(), path=path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def parse_json(data: bytes, *, path: Path) -> StoredJSON:
    """Return the JSON object in `data`, which was read from `path`; raise as `read_json` does."""
    try:
        content = load_json(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return StoredJSON(path, content)
