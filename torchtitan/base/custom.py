"""Custom code, named by import path: "package.module:NAME".

There is no registry, and no module is imported for its side effects: a setting names the object.
Importing a module runs it. So a path is imported if the user gave it: in a job's file, on the
command line or from Python. A path that a stored file names, which may come from a stranger, is a
`StoredPath`, which is refused without `--trust_code`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

from torchtitan.base.errors import ConfigError, UserError, did_you_mean

_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_trusts_stored: ContextVar[bool] = ContextVar("trusts_stored", default=False)


def is_import_path(text: object) -> TypeGuard[str]:
    """Return whether a value has the form package.module:NAME."""
    return isinstance(text, str) and _PATH.fullmatch(text) is not None


class StoredPath(str):
    """An import path that a stored file names."""

    file: str

    def __new__(cls, path: str, file: str = "") -> StoredPath:  # noqa: D102
        stored = super().__new__(cls, path)
        stored.file = file
        return stored


def mark_stored(value: object, *, file: str) -> Any:
    """Return a stored value with each import path as a `StoredPath`, unless code is trusted."""
    if _trusts_stored.get():
        return value
    if isinstance(value, dict):
        return {key: mark_stored(item, file=file) for key, item in value.items()}
    if isinstance(value, list):
        return [mark_stored(item, file=file) for item in value]
    return StoredPath(value, file) if is_import_path(value) else value


@contextmanager
def trusting_stored(does: bool) -> Iterator[None]:
    """Trust the import paths of stored settings that are read inside, if `does`."""
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


def load_object(path: str, *, key: str) -> Any:
    """Import the object that the import path of a setting names. The current folder is searched
    first, and last for later imports, also of data workers. Raises ConfigError if only a stored
    file names the path, or the object does not exist, or its module raises an error, naming
    `key`."""
    if not is_import_path(path):  # such a string in a stored file is not marked as a path
        raise ConfigError.at(key, f"must be an import path, package.module:NAME, got {path!r:.80}")
    if isinstance(path, StoredPath):
        raise ConfigError.at(
            key,
            f"{path.file} names '{path}', which would run its code; pass --trust_code (in Python: "
            f"trust_code=True) to import it",
        )
    module, _, names = path.partition(":")
    value = _import_module(module, path=path, key=key)
    for name in names.split("."):
        if not hasattr(value, name):
            public = [public_name for public_name in vars(value) if not public_name.startswith("_")]
            raise ConfigError.at(key, f"'{path}' has no {name}{did_you_mean(name, public)}")
        value = getattr(value, name)
    return value


def _import_module(name: str, *, path: str, key: str) -> Any:
    folder, before = os.getcwd(), [*sys.path]
    is_new = folder not in sys.path and "" not in sys.path
    try:
        if is_new:
            sys.path.insert(0, folder)
        with convert_errors(path, key=key):
            return importlib.import_module(name)
    finally:
        sys.path[:] = [*before, folder] if is_new else before


def instantiate(path: str, *, key: str, kwargs: Mapping[str, object]) -> Any:
    """Import a class or function and call it with `kwargs`; raise ConfigError if it does not exist,
    takes other arguments, or raises an error, naming `key`."""
    factory = load_object(path, key=key)
    with convert_errors(path, key=key):
        return factory(**kwargs)


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
        if not is_import_path(path) or _is_of_the_machine(error):
            raise
        rule = f"'{path}' raised an error:\n{describe_error(error)}"
        raise ConfigError.at(key, rule) from error


def _is_of_the_machine(error: BaseException) -> bool:
    """Return whether memory ran out or another rank is lost, which no change of the code mends."""
    names = {cls.__name__ for cls in type(error).__mro__}
    is_lost = re.search("timed out waiting|timeout|connection (closed|reset)", str(error).lower())
    return bool(names & {"OutOfMemoryError", "DistError"}) or (
        isinstance(error, RuntimeError) and is_lost is not None
    )


def describe_error(error: BaseException) -> str:
    """Return an error of custom code with the lines that raised it."""
    if isinstance(error, UserError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    # the first frame is our call
    custom = [f for f in frames[1:] if f.filename != __file__ and "importlib" not in f.filename]
    lines = [*traceback.format_list(custom), *traceback.format_exception_only(type(error), error)]
    return "".join(lines).rstrip()
