"""Sections and sizes that custom modules bring.

A custom model brings its sizes as keys of [model]. Any custom module may bring sections: a
dictionary `SECTIONS` from names to dataclasses.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torchtitan.base.custom import convert_errors, is_trusted, note_stored
from torchtitan.base.errors import ConfigError
from torchtitan.base.imports import load_module, load_object
from torchtitan.config.schema import (
    Path,
    check_section,
    extend,
    import_paths,
    keys,
    sections,
)
from torchtitan.config.sources import Layer

T = TypeVar("T")
MODEL: Path = ("model", "name")
ModelSectionOf = Callable[[Any], type]
"""Returns the section [model] with the sizes of a family as keys."""


def extend_tree(
    tree: type[T], named: Iterable[tuple[Path, str]], *, model_section: ModelSectionOf
) -> type[T]:
    """Return a tree with the sections and sizes of custom modules.

    Args:
        tree: The settings.
        named: Import paths, with the keys that hold them.
        model_section: Builds [model] for a custom family.

    Raises:
        ConfigError: A module cannot be imported, or brings no valid section.
    """
    added: dict[str, tuple[type, Callable[..., object]]] = {}
    brought: dict[str, type] = {}
    for path, text in named:
        key = ".".join(path)
        found = load_object(text, key=key)
        # models/families.py refuses a model without flavors
        if path == MODEL and getattr(found, "flavors", None):
            model = model_section(found.sizes)
            added["model"] = (model, model)
        for name, section in sections_of(text, key=key).items():
            is_taken = hasattr(tree, name) or (name,) in sections(tree)
            if is_taken or brought.setdefault(name, section) is not section:
                rule = f"'{text}' brings a section [{name}], and there is another; rename one"
                raise ConfigError.at(key, rule)
            try:
                check_section(section)
            except (TypeError, NameError) as error:
                rule = f"'{text}' brings a section [{name}] that cannot be one: {error}"
                raise ConfigError.at(key, rule) from error
            added[name] = (section, functools.partial(_make_section, section, text, key))
    return extend(tree, added) if added else tree


def _make_section(section: type, text: str, key: str, /, **values: object) -> object:
    with convert_errors(text, key=key):  # its __post_init__ is the user's code
        return section(**values)


def extend_stored_tree(
    tree: type[T], stored: Layer, *, file: str, model_section: ModelSectionOf
) -> tuple[type[T], Layer]:
    """Extend the tree of settings stored in `file`; also return those that the tree has.

    Modules that are not trusted are not imported, so their sections and sizes are left out.

    Raises:
        ConfigError: The model's module is trusted and cannot be imported.
    """
    named = import_paths(tree, {path: setting.value for path, setting in stored.items()})
    note_stored((text for _, text in named), file=file)
    made, found = tree, list[tuple[Path, str]]()
    for path, text in named:
        if not is_trusted(text):
            continue
        try:
            made = extend_tree(tree, [*found, (path, text)], model_section=model_section)
            found.append((path, text))
        except ConfigError:  # a callback that is gone does not matter
            if path == MODEL:
                raise
    if not named:  # then an unknown section is a mistake
        return made, stored
    names = {path[0] for path in keys(tree)}
    if any(path == MODEL and not is_trusted(text) for path, text in named):
        names.remove("model")
    known = {path: one for path, one in stored.items() if path[0] in names or path in keys(made)}
    return made, known


def sections_of(text: str, *, key: str) -> Mapping[str, type]:
    """Return the sections that the module of an import path brings, by name."""
    found = getattr(load_module(text, key=key), "SECTIONS", {})
    if not isinstance(found, dict) or not all(map(str.isidentifier, map(str, found))):
        rule = f"'{text}': SECTIONS must be a dictionary from names to dataclasses, got {found!r}"
        raise ConfigError.at(key, rule)
    return found


def sections_of_only(
    named: Iterable[tuple[Path, str]], *, selects: Callable[[Path], bool]
) -> set[str]:
    """Return the sections that only the modules of some keys bring.

    Args:
        named: Import paths, with the keys that hold them.
        selects: Whether the sections of a key count.
    """
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for path, text in named:
        if is_trusted(text):  # other modules were not imported
            found[selects(path)] |= sections_of(text, key=".".join(path)).keys()
    return found[True] - found[False]


def source_hash(path: str, *, key: str) -> str:
    """Return the hash of the source file of an import path's module, or "" without a file."""
    file = getattr(load_module(path, key=key), "__file__", None)  # a notebook has none
    if file is None or not pathlib.Path(file).is_file():
        return ""
    return hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
