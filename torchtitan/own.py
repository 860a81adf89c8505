"""What a model of the user's own adds to the settings of a job that names it: its sizes.

They are keys of [model], as those of our families are.
"""

from __future__ import annotations

from typing import TypeVar

from torchtitan.base.own import is_import_path, load_object, source_hash
from torchtitan.config.layers import Layer
from torchtitan.config.overrides import with_section
from torchtitan.models.settings import ModelConfig, model_section

T = TypeVar("T")
MODEL = ("model", "name")


def with_own(tree: type[T], given: Layer) -> type[T]:
    """Return the tree of a job: `tree`, or one with the sizes of the model that the job names.

    Raises:
        ConfigError: The model cannot be imported.
    """
    name = given[MODEL].value if MODEL in given else None
    if not isinstance(name, str) or not is_import_path(name):
        return tree
    spec = load_object(name, key=".".join(MODEL))
    if not getattr(spec, "flavors", None):  # refused at assembly, with what it has to be
        return tree
    section: type[ModelConfig] = model_section(spec.sizes)
    return with_section(tree, MODEL[0], section)


def hash_own(model: ModelConfig) -> dict[str, str]:
    """Return the hash of the source behind the model's name, by that, if it is an import path."""
    if not is_import_path(model.name):
        return {}
    return {model.name: source_hash(model.name, key=".".join(MODEL))}
