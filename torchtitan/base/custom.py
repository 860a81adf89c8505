"""Custom code, named by import path: "package.module:NAME".

There is no registry, and no module is imported for its side effects: a setting names the object,
and `imports.py` imports it. Importing a module runs it. So a path is imported only if the user has
named it: in a job's file, on the command line or from Python. A path in a stored file, which may
come from a stranger, needs `--trust_code`.
"""

from __future__ import annotations

import argparse
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeGuard

from torchtitan.base.errors import ConfigError, UserError

_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_trusted: set[str] = set()
"""Import paths that the user of this process has named. It grows as `sys.modules` does."""
_stored_in: dict[str, str] = {}
"""File that names an import path, for messages."""
_trusts_stored: ContextVar[bool] = ContextVar("trusts_stored", default=False)


def is_import_path(text: object) -> TypeGuard[str]:
    """Return whether a value has the form package.module:NAME."""
    return isinstance(text, str) and _PATH.fullmatch(text) is not None


def trust(paths: Iterable[str]) -> None:
    """Allow import paths that the user has named."""
    _trusted.update(paths)


def note_stored(paths: Iterable[str], *, file: str) -> None:
    """Remember that a stored file names import paths."""
    _stored_in.update(dict.fromkeys(paths, file))


@contextmanager
def trusting_stored(does: bool) -> Iterator[None]:
    """Allow import paths of stored settings inside, if `does`."""
    token = _trusts_stored.set(does)
    try:
        yield
    finally:
        _trusts_stored.reset(token)


def add_trust_code(parser: argparse.ArgumentParser) -> None:
    """Add the option `--trust_code` to a tool."""
    parser.add_argument(
        "--trust_code",
        action="store_true",
        help="import the modules that the stored settings name; they run with your permissions",
    )


def is_trusted(path: str) -> bool:
    """Return whether an import path may be imported."""
    return path in _trusted or _trusts_stored.get()


def check_trusted(path: str, *, key: str) -> None:
    """Raise ConfigError for setting `key` unless the import path may be imported."""
    if not is_trusted(path):
        raise ConfigError.at(
            key,
            f"{_stored_in.get(path, 'a stored file')} names '{path}', which would run its code; "
            "pass --trust_code (in Python: trust_code=True) to import it",
        )


@contextmanager
def convert_errors(path: str, *, key: str) -> Iterator[None]:
    """Raise an error of custom code as a ConfigError for setting `key`.

    Errors pass unchanged if `path` is no import path.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if not is_import_path(path):
            raise
        raise wrap_error(path, key=key, error=error) from error


def wrap_error(path: str, *, key: str, error: BaseException) -> ConfigError:
    """Return an error of custom code as a ConfigError for setting `key`."""
    return ConfigError.at(key, f"'{path}' raised an error:\n{describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """Return an error of custom code with the lines that raised it."""
    if isinstance(error, UserError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    # the first frame is our call
    custom = [frame for frame in frames if "importlib" not in frame.filename][1:]
    lines = [*traceback.format_list(custom), *traceback.format_exception_only(type(error), error)]
    return "".join(lines).rstrip()
