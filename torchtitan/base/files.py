"""Files that someone else may have written."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def check_is_file(path: Path) -> None:
    """Raise OSError where a path is no file: to open a pipe waits, and a device never ends."""
    if not path.is_file():
        code = errno.EINVAL if path.exists() else errno.ENOENT
        raise OSError(code, "it is no file" if path.exists() else os.strerror(code), str(path))


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Return the UTF-8 text of a file; raise OSError as `check_is_file` does."""
    check_is_file(path)
    return path.read_text(encoding="utf-8", errors=errors)
