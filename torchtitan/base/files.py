"""Paths and files that a user or another program wrote, and work that a machine does once."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchtitan.base.errors import ConfigError, DataError

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
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError.at(key, f"cannot look for {path!r:.200}: {reason}") from error
    return expanded


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError if a name that a run writes in its folder is a symbolic link.

    A folder may come from a stranger, and writing would follow the link out of it.
    """
    for name in names:
        parts = Path(name).parts
        for path in (folder.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)):
            if path.is_symlink():
                rule = f"must hold no links at names that the run writes, and {path} is one"
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


def load_json(text: str, *, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is not JSON, or has a lone surrogate, which no text file can hold.
        RecursionError: The value is nested too deeply.
    """
    found = json.loads(text, object_hook=object_hook)
    if "\\ud" in text.lower():
        json.dumps(found, ensure_ascii=False).encode()
    return found
