"""Which model a job names: a flavor, with sizes of its own, or a Hugging Face folder's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from torchtitan.base.errors import ConfigError, Violation, did_you_mean
from torchtitan.base.own import is_import_path, load_object
from torchtitan.config.overrides import given_overrides
from torchtitan.hf.config import architecture_of, check_family, family_of, read_config
from torchtitan.hf.names import CONFIG
from torchtitan.job import Config
from torchtitan.models.families import MODELS
from torchtitan.models.rope_scaling import build_scaling
from torchtitan.models.settings import (
    ALL_SIZES,
    HF,
    ModelConfig,
    ModelSection,
    RopeScalingConfig,
)
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.trajectory import CONFIG_FILE, Job

HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def find_model(settings: ModelConfig) -> tuple[ModelSpec, DecoderConfig]:
    """Look up a model and its flavor, and put the sizes that the job gives in their place.

    Raises:
        ConfigError: There is none of that name, it has no such flavor, or sizes do not fit.
    """
    spec = _find_spec(settings)
    given = given_overrides(settings, of=spec.sizes)
    if settings.flavor == HF:
        if missing := spec.sizes.missing(given):
            rule = (
                f'"hf" means the model of checkpoint.initial_load_path with initial_load_in_hf = '
                f"true, or sizes that are all given, and {', '.join(missing)} are not; name a "
                f"folder of Hugging Face, or a flavor: {', '.join(spec.flavors)}"
            )
            raise ConfigError.at(("model.flavor", "checkpoint.initial_load_in_hf"), rule)
        architecture = spec.sizes(**given, **spec.of_family)
    elif settings.flavor in spec.flavors:
        architecture = replace(spec.flavors[settings.flavor], **given)
    else:
        flavors = (*spec.flavors, HF)
        rule = (
            f"must be one of {', '.join(flavors)} for {spec.name}, got '{settings.flavor}'"
            f"{did_you_mean(settings.flavor, flavors)}"
        )
        if others := [name for name, other in MODELS.items() if settings.flavor in other.flavors]:
            rule += f"; it is a flavor of {' and '.join(others)}"
        raise ConfigError.at(("model.flavor", "model.name"), rule)
    if settings.rope_scaling.type != "flavor":
        values = asdict(settings.rope_scaling)
        scaling = build_scaling(values.pop("type"), values)
        architecture = replace(architecture, rope_scaling=scaling)
    given |= given_overrides(settings, of=ALL_SIZES)
    wrong = [*architecture.violations()]
    for key in sorted({*given, *architecture.given(of_family=False)}):
        if not _has_size(spec, key):
            having = [other.name for other in MODELS.values() if _has_size(other, key)]
            rule = f"is no size of {spec.name}; remove it, or take {' or '.join(having)}"
            wrong.append(Violation((key, "name"), rule))
    if wrong:
        raise ConfigError([_tell(one, given=given, settings=settings) for one in wrong])
    return spec, architecture


def describe_model(settings: ModelConfig, *, spec: ModelSpec) -> str:
    """Name the flavor, and the sizes that take the place of its own."""
    given = given_overrides(settings, of=spec.sizes)
    sizes = ", ".join(f"{name} {value}" for name, value in given.items())
    return f"{settings.flavor} ({sizes})" if sizes else settings.flavor


def resolve_model(config: Config) -> Config:
    """Give the settings of a job with the model of a Hugging Face folder its family and sizes.

    They are stored with the run, which has no more need of the folder: where it is gone, they are
    those of the run so far.

    Raises:
        UserError: The folder is not there, or of a model that is not built here.
    """
    model, run = config.model, Path(config.job.dump_folder) / CONFIG_FILE
    path = config.checkpoint.initial_load_path
    if model.flavor != HF or not config.checkpoint.initial_load_in_hf:
        return config
    kind = ALL_SIZES if model.name == HF else _find_spec(model).sizes
    sizes = given_overrides(model, of=kind)
    if model.name != HF and not kind.missing(sizes):
        return config
    assert path is not None, "initial_load_in_hf needs initial_load_path"
    if not (Path(path) / CONFIG).is_file() and run.is_file():
        found = Job.stored_in(run).config.model
    else:
        if not Path(path).is_dir():
            raise not_there(path)
        theirs = read_config(Path(path))
        if model.name == HF:
            spec = family_of(theirs, models=MODELS)
        else:
            spec = _find_spec(model)
            check_family(theirs, format=spec.hf)
        found = describe(spec, architecture_of(theirs, spec=spec))
    scaling = model.rope_scaling if model.rope_scaling.type != "flavor" else found.rope_scaling
    sizes = {**given_overrides(found, of=kind), **sizes}
    return replace(config, model=replace(model, name=found.name, rope_scaling=scaling, **sizes))


def not_there(path: str) -> ConfigError:
    """Return the error of a folder of Hugging Face that is not there, perhaps a name on its Hub."""
    remedy = "name a folder of Hugging Face: config.json and safetensors files"
    if HUB_NAME.fullmatch(path) and not Path(path).parent.exists():
        remedy = (
            f'nothing is downloaded here: fetch it with "hf download {path} --local-dir DIR", and '
            f"name DIR"
        )
    rule = f"there is no folder {path}; {remedy}"
    return ConfigError.at("checkpoint.initial_load_path", rule)


def describe(spec: ModelSpec, architecture: DecoderConfig) -> ModelConfig:
    """Return the settings of a model, whether or not a flavor has its sizes."""
    scaling = architecture.rope_scaling
    rotation: dict[str, Any] = {} if scaling is None else asdict(scaling)
    return ModelSection(
        name=spec.name,
        flavor=HF,
        rope_scaling=RopeScalingConfig(type=scaling.type if scaling else "none", **rotation),
        **architecture.given(of_family=False),
    )


def _find_spec(settings: ModelConfig) -> ModelSpec:
    if (name := settings.name) in MODELS:
        return MODELS[name]
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
        f"must be one of {', '.join(MODELS)}, or the import path of a ModelSpec as "
        f"my_package.my_model:SPEC, got '{name}'{did_you_mean(name, MODELS)}"
    )
    raise ConfigError.at("model.name", rule)


def _tell(violation: Violation, *, given: Mapping[str, Any], settings: ModelConfig) -> Violation:
    """Add which of the sizes are the flavor's."""
    others = [key for key in violation.keys if key not in (*given, "head_dim", "name")]
    rule = violation.rule
    if others:
        rule += f" ({' and '.join(others)} as in flavor {settings.flavor})"
    return replace(violation, rule=rule).within("model")


def _has_size(spec: ModelSpec, key: str) -> bool:
    """Tell whether a family has a size; a window it also has without files of Hugging Face."""
    if key != "window":
        return any(one.name == key for one in fields(spec.sizes))
    return not spec.hf.names or any(ours == "window" for ours, _ in spec.hf.more_counts.values())
