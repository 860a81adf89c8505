"""What modules of the user's own add to the settings of a job that names them.

A model of one's own has sizes of its own, keys of [model] as ours are. And a module may bring
sections, by a dictionary `SECTIONS` from a name to a dataclass with a default for each field.
"""

from __future__ import annotations

from typing import TypeVar

from torchtitan.base.errors import ConfigError
from torchtitan.base.own import is_import_path, load_module, load_object, source_hash
from torchtitan.config.fields import fields, section_fields, values_of
from torchtitan.config.layers import Layer, Path
from torchtitan.config.overrides import with_sections
from torchtitan.models.settings import model_section

T = TypeVar("T")
MODEL = ("model", "name")


def with_own(tree: type[T], given: Layer) -> type[T]:
    """Return the tree of a job: `tree`, with what the modules that its settings name add to it.

    Raises:
        ConfigError: A module cannot be imported, or what it brings is no section.
    """
    values = {path: setting.value for path, setting in given.items() if path in fields(tree)}
    named = _import_paths(tree, values)
    added: dict[str, type] = {}
    if MODEL in named:
        spec = load_object(named[MODEL], key=".".join(MODEL))
        if hasattr(spec, "sizes"):  # else it is refused at assembly, with what it has to be
            added["model"] = model_section(spec.sizes)
    for path, text in named.items():
        key = ".".join(path)
        brought = getattr(load_module(text, key=key), "SECTIONS", {})
        try:
            there = [name for name in brought if name in section_fields(tree)]
            if there:
                raise TypeError(f"there is a section {', '.join(there)} already")
            for path_there, facts in fields(with_sections(tree, brought)).items():
                if path_there[0] in brought and facts.item not in (str, int, float, bool):
                    raise TypeError(f"{'.'.join(path_there)} is a {facts.item}")
        except (AssertionError, AttributeError, TypeError) as error:
            raise ConfigError.at(
                key,
                f"'{text}' must bring SECTIONS that are dataclasses of numbers, switches, texts "
                f"and lists: {error}",
            ) from error
        added |= brought
    return with_sections(tree, added) if added else tree


def hash_own(config: object) -> dict[str, str]:
    """Return the hash of the source behind each import path in settings."""
    named = _import_paths(type(config), values_of(config))
    return {text: source_hash(text, key=".".join(path)) for path, text in named.items()}


def _import_paths(tree: type, values: dict[Path, object]) -> dict[Path, str]:
    found = {}
    for path, facts in fields(tree).items():
        value = values.get(path)
        texts = value if isinstance(value, list | tuple) else [value]
        for text in texts if facts.may_be_own else ():
            if isinstance(text, str) and is_import_path(text):
                found[path] = text
    return found
