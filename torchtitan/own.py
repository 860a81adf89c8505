"""What modules of the user's own add to the settings of a job that names them.

A model has sizes of its own: keys of [model], as those of our families are. And any module may
bring sections, by a dictionary `SECTIONS` from a name to a dataclass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torchtitan.base.errors import ConfigError
from torchtitan.base.own import is_import_path, load_module, load_object
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
    added: dict[str, type] = {}
    brought: dict[str, type] = {}
    for path, text in _find(tree, {path: setting.value for path, setting in given.items()}):
        key = ".".join(path)
        found = load_object(text, key=key)
        # without flavors it is refused at assembly, with what it has to be
        if path == MODEL and getattr(found, "flavors", None):
            added["model"] = model_section(found.sizes)
        for name, section in sections_of(text, key=key).items():
            if name in section_fields(tree) or brought.setdefault(name, section) is not section:
                rule = f"'{text}' brings a section [{name}], and there is another; rename one"
                raise ConfigError.at(key, rule)
            try:
                added[name] = strict_section(section)
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


def own_sections(config: object) -> dict[str, Any]:
    """Return the values of all such sections of a job, by name."""
    named = find_own(config)
    names = {name for path, text in named for name in sections_of(text, key=".".join(path))}
    return {name: getattr(config, name) for name in sorted(names)}


def _find(tree: type, values: Mapping[Path, object]) -> Iterator[tuple[Path, str]]:
    for path, facts in fields(tree).items():
        value = values.get(path)
        texts = value if isinstance(value, (list, tuple)) else [value]
        for text in texts if facts.may_be_own else ():
            if isinstance(text, str) and is_import_path(text):
                yield path, text
