"""Import the objects that settings name, call them and check their methods.

`custom.py` decides what may be imported.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from torchtitan.base.custom import convert_errors, is_import_path, refuse_stored, wrap_error
from torchtitan.base.errors import ConfigError, did_you_mean


def load_module(path: str, *, key: str) -> ModuleType:
    """Import the module of an import path. The current folder is searched first.

    Raises:
        ConfigError: The module is not trusted, does not exist or raises an error, or `path` is no
            import path; names `key`.
    """
    if not is_import_path(path):  # such a string in a stored file is not marked as a path
        raise ConfigError.at(key, f"must be an import path, package.module:NAME, got {path!r:.80}")
    refuse_stored(path, key=key)
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
        raise wrap_error(path, key=key, error=error) from error
    except (Exception, SystemExit) as error:
        raise wrap_error(path, key=key, error=error) from error
    finally:
        sys.path[:] = before


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
    """Import a class or function and call it with `kwargs`.

    Raises:
        ConfigError: It does not exist, takes other arguments, or raises an error; names `key`.
    """
    factory = load_object(path, key=key)
    with convert_errors(path, key=key):
        return factory(**kwargs)


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
