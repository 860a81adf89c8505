"""Files that another program may have written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
