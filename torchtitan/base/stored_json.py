"""JSON objects that another program may have written: each missing or wrong value is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file, load_json


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
        """Return self if each present key of `types` has a value of exactly that type.

        Raises:
            CheckpointError: A value has another type.
        """
        for key, cls in types.items():
            if key in self and type(self[key]) is not cls:  # exact: true is an int to isinstance
                raise CheckpointError(
                    f"{self.path} is damaged: '{key}' must be of type {cls.__name__}, got "
                    f"{str(self[key])[:60]!r}; use another checkpoint"
                )
        return self

    def check_counts(self, *keys: str) -> StoredJSON:
        """Return self if the values of `keys` are counts: integers from 0 to 2^63 - 1.

        Raises:
            CheckpointError: A value is out of range.
        """
        for key in keys:
            if not 0 <= self[key] < 2**63:
                raise CheckpointError(
                    f"{self.path} is damaged: '{key}' must be 0 or more and fit into 64 bits, got "
                    f"{str(self[key])[:60]}; use another checkpoint"
                )
        return self


def read_json(path: Path) -> StoredJSON:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing or does not hold a JSON object.
    """
    try:
        check_is_file(path)
        return parse_json(path.read_bytes(), path=path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def parse_json(data: bytes, *, path: Path) -> StoredJSON:
    """Return the JSON object in `data`, which was read from `path`; raise as `read_json` does."""
    try:
        content = load_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return StoredJSON(path, content)
