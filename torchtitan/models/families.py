"""The built-in model families, and which model the [model] section names.

A family's file is imported when the family is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

from torchtitan.base.custom import is_import_path, load_object
from torchtitan.base.errors import ConfigError, Violation, did_you_mean
from torchtitan.base.files import read_json
from torchtitan.models.settings import (
    HF,
    TRANSFORMERS,
    AllSizes,
    ModelConfig,
    ModelSection,
    given_sizes,
)
from torchtitan.models.sizes import DecoderConfig, RopeScaling
from torchtitan.models.spec import ModelSpec

HF_CONFIG = "config.json"


class Families(Mapping[str, ModelSpec]):
    """Model families by name.

    `modules` names the module of each family, whose `SPEC` describes it.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules

    def __getitem__(self, name: str) -> ModelSpec:
        spec: ModelSpec = import_module(self._modules[name]).SPEC
        return spec

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


MODELS = Families(
    {
        "llama3": "torchtitan.models.llama3",
        "qwen2": "torchtitan.models.qwen2",
        "qwen3": "torchtitan.models.qwen3",
        "qwen3_moe": "torchtitan.models.qwen3_moe",
        "deepseek_v3": "torchtitan.models.deepseek_v3",
        "deepseek_v2": "torchtitan.models.deepseek_v2",
        "mistral": "torchtitan.models.mistral",
        "mixtral": "torchtitan.models.mixtral",
        "phi3": "torchtitan.models.phi3",
        "gemma3": "torchtitan.models.gemma3",
        "olmo2": "torchtitan.models.olmo2",
        "olmo3": "torchtitan.models.olmo3",
        "smollm3": "torchtitan.models.smollm3",
        "granite": "torchtitan.models.granite",
        "glm4_moe": "torchtitan.models.glm4_moe",
        "gpt_oss": "torchtitan.models.gpt_oss",
    }
)


def find_model(settings: ModelConfig) -> tuple[ModelSpec, DecoderConfig]:
    """Return the model family and the sizes that the settings name; raise ConfigError if there is
    no such family or flavor, or the sizes do not fit together."""
    spec = find_spec(settings)
    sizes = given_sizes(settings, of=spec.sizes)
    if settings.flavor == HF:
        if missing := spec.sizes.missing(sizes):
            rule = (
                f'"hf" needs checkpoint.initial_load_in_hf, or all sizes of the model, and '
                f"{', '.join(missing)} are not given"
            )
            raise ConfigError.at(("model.flavor", "checkpoint.initial_load_in_hf"), rule)
        architecture = spec.sizes(**sizes, **spec.of_family)
    elif settings.flavor in spec.flavors:
        flavor = spec.flavors[settings.flavor]
        architecture = replace(flavor, **sizes)
        if architecture.dim != flavor.dim:  # a model of one's own, not stretched like the flavor
            architecture = replace(architecture, rope_scaling=None)
    elif spec.read is not None and (Path(settings.flavor) / HF_CONFIG).is_file():
        architecture = replace(spec.read(read_json(Path(settings.flavor) / HF_CONFIG)), **sizes)
    else:
        flavors = (*spec.flavors, HF, *(["a folder with config.json"] if spec.read else []))
        rule = (
            f"must be one of {', '.join(flavors)} for {spec.name}, got '{settings.flavor}'"
            f"{did_you_mean(settings.flavor, flavors)}"
        )
        raise ConfigError.at(("model.flavor", "model.name"), rule)
    scaling = settings.rope_scaling
    if scaling.type != "flavor":
        architecture = replace(
            architecture, rope_scaling=None if scaling.type == "none" else scaling
        )
    note = f"; other sizes are from {settings.flavor}" if sizes else ""
    wrong = [replace(broken, rule=broken.rule + note) for broken in architecture.violations()]
    built_in = replace(settings, options={})
    keys = {*given_sizes(built_in, of=AllSizes), *architecture.given(of_family=False)}
    wrong += [
        Violation((key, "name"), f"is no size of {spec.name}; remove it")
        for key in sorted(keys)
        if not _has_size(spec, key)
    ]
    if wrong:
        raise ConfigError([_as_setting(violation, settings) for violation in wrong])
    if spec.describe is not None:
        spec = replace(spec, **spec.describe(architecture))
    return spec, architecture


def _as_setting(violation: Violation, settings: ModelConfig) -> Violation:
    """Return a violation about sizes with the paths of their settings."""
    keys = (key if hasattr(settings, key) else f"options.{key}" for key in violation.keys)
    return replace(violation, keys=tuple(keys)).within("model")


def describe_model(settings: ModelConfig, *, spec: ModelSpec) -> str:
    """Return the flavor, and the sizes that replace its own."""
    sizes = given_sizes(settings, of=spec.sizes)
    text = ", ".join(f"{name} {value or 0}" for name, value in sizes.items() if name != "config")
    return f"{settings.flavor} ({text})" if text else settings.flavor


def to_settings(spec: ModelSpec, architecture: DecoderConfig) -> ModelConfig:
    """Return settings that give every size, whether or not a flavor has them."""
    sizes = architecture.given(of_family=False)
    options = {key: sizes.pop(key) for key in list(sizes) if not hasattr(ModelSection, key)}
    return ModelSection(
        name=spec.name,
        flavor=HF,
        rope_scaling=architecture.rope_scaling or RopeScaling(type="none"),
        options=options,
        **sizes,
    )


def find_spec(settings: ModelConfig) -> ModelSpec:
    """Look up the family that the settings name; raise ConfigError if no family has that name."""
    if (name := settings.name) in MODELS:
        return MODELS[name]
    if name == TRANSFORMERS:
        spec = import_module("torchtitan.models.transformers").SPEC
        assert isinstance(spec, ModelSpec)
        return spec
    if name == HF:
        rule = (
            f'"hf" needs flavor = "hf" and checkpoint.initial_load_in_hf; write both, or one of '
            f"{', '.join(MODELS)}"
        )
        raise ConfigError.at(("model.name", "model.flavor"), rule)
    if is_import_path(name):
        spec = load_object(name, key="model.name")
        if isinstance(spec, ModelSpec) and spec.flavors:
            return spec
        raise ConfigError.at(
            "model.name",
            f"must name a torchtitan.models.spec.ModelSpec with a flavor, got '{name}', which is "
            f"{spec!r:.80}",
        )
    rule = (
        f"must be one of {', '.join(MODELS)}, {TRANSFORMERS}, or the import path of a ModelSpec as "
        f"my_package.my_model:SPEC, got '{name}'{did_you_mean(name, MODELS)}"
    )
    raise ConfigError.at("model.name", rule)


def _has_size(spec: ModelSpec, key: str) -> bool:
    """Return whether a family has a size."""
    [*size] = (size for size in fields(spec.sizes) if size.name == key)
    in_files = any(stored.field == key for stored in spec.hf.sizes.values())
    if not spec.hf.names:  # its module has the sizes that a flavor sets, and windows
        in_files = key == "window" or any(vars(f).get(key) for f in spec.flavors.values())
    tags = size[0].metadata if size else {"of_family": True}
    return not tags.get("of_family") and (in_files or not tags.get("of_files"))
