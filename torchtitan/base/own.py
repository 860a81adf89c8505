"""Things of the user's own, named by import path: "package.module:NAME".

No registry and no import for its side effects: the settings name the object. A class or function is
called with the arguments that it names, of those that its place has on offer, and what comes of it
must have the methods of that place's protocol.

To import a module is to run it, and to call what an import path names is to run anything. So a path
is imported only if the user has named it: in a job's file, on the command line or from Python. One
that a stored file names, which may be a stranger's, needs `--trust_code`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from torchtitan.base.errors import ConfigError, UserError, did_you_mean

_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_named: set[str] = set()
"""Import paths that the user of this process has named; it grows as `sys.modules` does."""
_stored_in: dict[str, str] = {}
"""The file whose settings name an import path, for messages."""
_trusts_stored: ContextVar[bool] = ContextVar("trusts_stored", default=False)


def is_import_path(text: object) -> TypeGuard[str]:
    """Tell whether a value has the form package.module:NAME."""
    return isinstance(text, str) and _PATH.fullmatch(text) is not None


def trust(paths: Iterable[str]) -> None:
    """Allow import paths that the user has named."""
    _named.update(paths)


def note_stored(paths: Iterable[str], *, file: str) -> None:
    """Remember which stored file names import paths."""
    _stored_in.update(dict.fromkeys(paths, file))


@contextmanager
def trusting_stored(does: bool) -> Iterator[None]:
    """Allow import paths of stored settings too, inside, if the user has asked for it."""
    token = _trusts_stored.set(does)
    try:
        yield
    finally:
        _trusts_stored.reset(token)


def add_trust_code(parser: argparse.ArgumentParser) -> None:
    """Add the option of tools that may need code that stored settings name."""
    parser.add_argument(
        "--trust_code",
        action="store_true",
        help="import the modules that the stored settings name; they run as your own code",
    )


def is_trusted(path: str) -> bool:
    """Return whether an import path may be imported."""
    return path in _named or _trusts_stored.get()


def check_trusted(path: str, *, key: str) -> None:
    """Raise ConfigError unless an import path may be imported; `key` is the setting that has it."""
    if not is_trusted(path):
        raise ConfigError.at(
            key,
            f"{_stored_in.get(path, 'a stored file')} names '{path}', code that would run; pass "
            "--trust_code (in Python: trust_code=True) to import it",
        )


def load_module(path: str, *, key: str) -> ModuleType:
    """Import the module of an import path; the current folder is searched first.

    Raises:
        ConfigError: It is not trusted, is not there, or raises when it is imported; `key` is the
            setting to blame.
    """
    check_trusted(path, key=key)
    name = path.partition(":")[0]
    try:
        with _search_here() as here:
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError.at(
                key,
                f"must name a module that can be imported, got '{path}', and there is no "
                f"{error.name}; start where {error.name} lies ({here} is searched), or install it"
                + ("; write the module without .py" if name.endswith(".py") else ""),
            ) from error
        raise _raised(path, key=key, error=error) from error
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise _raised(path, key=key, error=error) from error


@contextmanager
def _search_here() -> Iterator[str]:
    """Let modules of the current folder be found, inside, and give it."""
    here, before = os.getcwd(), [*sys.path]
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        yield here
    finally:
        sys.path[:] = before


@contextmanager
def within(path: str, *, key: str) -> Iterator[None]:
    """Word what is raised inside of the user's code as a mistake of the setting that names it."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if not is_import_path(path):
            raise
        raise _raised(path, key=key, error=error) from error


def load_object(path: str, *, key: str) -> Any:
    """Return what an import path names.

    Raises:
        ConfigError: There is no such module or name; `key` is the setting to blame.
    """
    found: Any = load_module(path, key=key)
    module, _, names = path.partition(":")
    for name in names.split("."):
        if not hasattr(found, name):
            there = [other for other in vars(found) if not other.startswith("_")]
            raise ConfigError.at(
                key,
                f"must name what its module has, got '{path}', and {module} has no {name}"
                f"{did_you_mean(name, there)}",
            )
        found = getattr(found, name)
    return found


def make(path: str, *, key: str, offered: Mapping[str, object]) -> Any:
    """Return what an import path names; a class or function is called first.

    Each of its parameters gets what is `offered` under its name.

    Raises:
        ConfigError: It is not there, asks for something else, or raises an error of its own.
    """
    found = load_object(path, key=key)
    if not (isinstance(found, type) or inspect.isroutine(found)):
        return found
    arguments: dict[str, object] = {}
    for name, parameter in inspect.signature(found).parameters.items():
        is_needed = parameter.default is parameter.empty
        if name in offered:
            arguments[name] = offered[name]
        elif is_needed and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError.at(
                key,
                f"'{path}' must ask for what there is, and nothing is called {name!r}"
                f"{did_you_mean(name, offered)}; rename it, give it a default, or take one of "
                f"{', '.join(offered)}",
            )
    with within(path, key=key):
        return found(**arguments)


def check_methods(
    found: object, protocol: type, *, path: str, key: str, optional: Collection[str] = ()
) -> None:
    """Check that an object has the methods of a protocol, and that they take its arguments.

    Raises:
        ConfigError: Names the method that is missing or takes others.
    """
    for name, wanted in vars(protocol).items():
        if not inspect.isfunction(wanted) or name in ("__init__", "__subclasshook__"):
            continue  # the latter two are what `Protocol` adds
        parameters = list(inspect.signature(wanted).parameters)[1:]
        method = getattr(found, name, None)
        if method is None and name in optional:
            continue
        rule = f"'{path}' must have a method {name}({', '.join(parameters)})"
        if not callable(method):
            raise ConfigError.at(key, f"{rule}, and {found!r:.80} has none; add it")
        try:
            signature = inspect.signature(method)
        except ValueError:  # of a class written in C, which does not tell
            continue
        try:
            signature.bind(*parameters)
        except TypeError as error:
            raise ConfigError.at(key, f"{rule}, got {name}{signature}; mend it") from error


def source_hash(path: str, *, key: str) -> str:
    """Return the hash of the file of an import path's module, "" where there is none."""
    file = getattr(load_module(path, key=key), "__file__", None)  # a notebook has none
    if file is None or not Path(file).is_file():
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _raised(path: str, *, key: str, error: BaseException) -> ConfigError:
    """Say what was raised inside of the user's module, and where."""
    return ConfigError.at(
        key, f"'{path}' raised an error of its own; mend it:\n{describe_error(error)}"
    )


def describe_error(error: BaseException) -> str:
    """Return an error of the user's code with the lines of it that raised it."""
    if isinstance(error, UserError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    # our call and importlib's frames come first
    theirs = [frame for frame in frames if "importlib" not in frame.filename][1:]
    said = "".join(traceback.format_list(theirs)) + "".join(
        traceback.format_exception_only(type(error), error)
    )
    return said.rstrip()
