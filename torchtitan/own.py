"""What modules of the user's own add to the settings of a job that names them.

A model has sizes of its own: keys of [model], as those of our families are. And any module may
bring sections, by a dictionary `SECTIONS` from a name to a dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from torchtitan.base.errors import ConfigError
from torchtitan.base.own import (
    is_import_path,
    is_trusted,
    load_module,
    load_object,
    note_stored,
    trust,
    within,
)
from torchtitan.config.fields import fields, section_fields, values_of
from torchtitan.config.layers import Layer, Path
from torchtitan.config.overrides import strict_section, with_sections
from torchtitan.models.settings import model_section

T = TypeVar("T")
MODEL = ("model", "name")


def with_own(tree: type[T], given: Layer) -> type[T]:
    """Return the tree of a job: `tree`, with what the modules that its settings name add to it.

    Raises:
        ConfigError: A module cannot be imported, or what it brings is no section.
    """
    named = list(_find_given(tree, given))
    trust(text for _, text in named)
    return _with(tree, named)


def with_stored_own(tree: type[T], stored: Layer, *, file: str) -> tuple[type[T], Layer]:
    """Do the same for the settings stored in `file`; return them too, without what is not known.

    Modules that are not trusted are not imported, so their sections and sizes are left out.

    Raises:
        ConfigError: The model's module is trusted and cannot be imported.
    """
    named = list(_find_given(tree, stored))
    note_stored((text for _, text in named), file=file)
    made, found = tree, list[tuple[Path, str]]()
    for path, text in named:
        if not is_trusted(text):
            continue
        try:
            made = _with(tree, [*found, (path, text)])
            found.append((path, text))
        except ConfigError:  # a callback that is gone, say, is no matter
            if path == MODEL:
                raise
    if not named:  # then an unknown section is a mistake
        return made, stored
    ours = {*section_fields(tree)}
    if any(path == MODEL and not is_trusted(text) for path, text in named):
        ours.remove("model")
    return made, {
        path: one for path, one in stored.items() if path[0] in ours or path in fields(made)
    }


def _with(tree: type[T], named: Iterable[tuple[Path, str]]) -> type[T]:
    added: dict[str, type] = {}
    brought: dict[str, type] = {}
    for path, text in named:
        key = ".".join(path)
        found = load_object(text, key=key)
        # without flavors it is refused at assembly, with what it has to be
        if path == MODEL and getattr(found, "flavors", None):
            added["model"] = model_section(found.sizes)
        for name, section in sections_of(text, key=key).items():
            if (
                hasattr(tree, name)
                or name in section_fields(tree)
                or brought.setdefault(name, section) is not section
            ):
                rule = f"'{text}' brings a section [{name}], and there is another; rename one"
                raise ConfigError.at(key, rule)
            try:
                added[name] = strict_section(section, running=partial(within, text, key=key))
            except (TypeError, NameError) as error:
                rule = f"'{text}' brings a section [{name}] that cannot be one: {error}; mend it"
                raise ConfigError.at(key, rule) from error
    return with_sections(tree, added) if added else tree


def find_own(config: object) -> list[tuple[Path, str]]:
    """Return each import path in settings, after the key that holds it."""
    return list(_find(type(config), values_of(config)))


def sections_of(text: str, *, key: str) -> Mapping[str, type]:
    """Return the sections that the module of an import path brings, by name."""
    found = getattr(load_module(text, key=key), "SECTIONS", {})
    if not isinstance(found, dict) or not all(map(str.isidentifier, map(str, found))):
        rule = f"'{text}': SECTIONS must be a dictionary from names to dataclasses, got {found!r}"
        raise ConfigError.at(key, f"{rule}; mend it")
    return found


def watching_sections(config: object, *, is_watcher: Callable[[Path], bool]) -> set[str]:
    """Return the sections in a job's settings that only modules of watchers bring, by the key that
    names them."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for path, text in find_own(config):
        if is_trusted(text):  # the others' sections were left out
            found[is_watcher(path)] |= sections_of(text, key=".".join(path)).keys()
    return found[True] - found[False]


def own_sections(config: object) -> dict[str, Any]:
    """Return the values of all such sections that a job has, by name."""
    named = [(path, text) for path, text in find_own(config) if is_trusted(text)]
    names = {name for path, text in named for name in sections_of(text, key=".".join(path))}
    return {name: getattr(config, name) for name in sorted(names)}


def _find_given(tree: type, given: Layer) -> Iterator[tuple[Path, str]]:
    return _find(tree, {path: setting.value for path, setting in given.items()})


def _find(tree: type, values: Mapping[Path, object]) -> Iterator[tuple[Path, str]]:
    for path, facts in fields(tree).items():
        value = values.get(path)
        texts = value if isinstance(value, (list, tuple)) else [value]
        for text in texts if facts.may_be_own else ():
            if isinstance(text, str) and is_import_path(text):
                yield path, text
