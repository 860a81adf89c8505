"""Custom code, named by import path: "package.module:NAME".

There is no registry, and no module is imported for its side effects: a setting names the object. A
class or function is called with those of the offered arguments that its signature names, and the
result must have the methods of a protocol.

Importing a module runs it. So a path is imported only if the user has named it: in a job's file, on
the command line or from Python. A path in a stored file, which may come from a stranger, needs
`--trust_code`.
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


def load_module(path: str, *, key: str) -> ModuleType:
    """Import the module of an import path. The current folder is searched first.

    Raises:
        ConfigError: The module is not trusted, does not exist or raises an error; names `key`.
    """
    check_trusted(path, key=key)
    name = path.partition(":")[0]
    folder, before = os.getcwd(), [*sys.path]
    try:
        if folder not in sys.path and "" not in sys.path:
            sys.path.insert(0, folder)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError.at(
                key,
                f"'{path}': no module {error.name} is installed or in {folder}"
                + ("; write the module without .py" if name.endswith(".py") else ""),
            ) from error
        raise _wrap(path, key=key, error=error) from error
    except (Exception, SystemExit) as error:
        raise _wrap(path, key=key, error=error) from error
    finally:
        sys.path[:] = before


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
        raise _wrap(path, key=key, error=error) from error


def load_object(path: str, *, key: str) -> Any:
    """Return the object that an import path names.

    Raises:
        ConfigError: The module or the name does not exist; names `key`.
    """
    found: Any = load_module(path, key=key)
    module, _, names = path.partition(":")
    for name in names.split("."):
        if not hasattr(found, name):
            public = [other for other in vars(found) if not other.startswith("_")]
            raise ConfigError.at(
                key, f"'{path}': {module} has no {name}{did_you_mean(name, public)}"
            )
        found = getattr(found, name)
    return found


def instantiate(path: str, *, key: str, kwargs: Mapping[str, object]) -> Any:
    """Import `path` and call it with the `kwargs` that its signature names.

    An object that is neither a class nor a function is returned as it is.

    Raises:
        ConfigError: It does not exist, requires another argument, or raises an error; names `key`.
    """
    found = load_object(path, key=key)
    if not (isinstance(found, type) or inspect.isroutine(found)):
        return found
    arguments: dict[str, object] = {}
    for name, parameter in inspect.signature(found).parameters.items():
        is_required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if name in kwargs:
            arguments[name] = kwargs[name]
        elif is_required:
            raise ConfigError.at(
                key,
                f"'{path}' requires {name!r}, which is not available{did_you_mean(name, kwargs)}; "
                f"available are {', '.join(kwargs)}",
            )
    with convert_errors(path, key=key):
        return found(**arguments)


def check_methods(
    found: object, protocol: type, *, path: str, key: str, optional: Collection[str] = ()
) -> None:
    """Check that an object has the methods of a protocol, with the same number of parameters.

    A hook that is called at the end would otherwise fail after days.

    Raises:
        ConfigError: Names the method that is missing or has other parameters, and `key`.
    """
    for name, method in vars(protocol).items():
        if not inspect.isfunction(method) or name in ("__init__", "__subclasshook__"):
            continue  # the latter two are added by `Protocol`
        parameters = list(inspect.signature(method).parameters)[1:]
        rule = f"'{path}' must have a method {name}({', '.join(parameters)})"
        custom = getattr(found, name, None)
        if custom is None and name in optional:
            continue
        if not callable(custom):
            raise ConfigError.at(key, rule)
        try:
            signature = inspect.signature(custom)
            signature.bind(*parameters)
        except ValueError:  # written in C, without a signature
            continue
        except TypeError as error:
            raise ConfigError.at(key, f"{rule}, got {name}{signature}") from error


def source_hash(path: str, *, key: str) -> str:
    """Return the hash of the source file of an import path's module, or "" without a file."""
    file = getattr(load_module(path, key=key), "__file__", None)  # a notebook has none
    if file is None or not Path(file).is_file():
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _wrap(path: str, *, key: str, error: BaseException) -> ConfigError:
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
