"""The model that a Hugging Face folder describes, and whether such a folder can hold a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.base.files import read_json
from torchtitan.checkpoint.settings import EXPORT
from torchtitan.hf.config import (
    architecture_of,
    check_family,
    family_of,
    find_inexpressible,
    read_config,
)
from torchtitan.hf.folder import is_hf_folder
from torchtitan.hf.names import CONFIG, Names
from torchtitan.models.families import MODELS, find_spec, to_settings
from torchtitan.models.interface import LanguageModel
from torchtitan.models.settings import HF, AllSizes, ModelConfig, given_sizes
from torchtitan.models.spec import ModelSpec

logger = logging.getLogger(__name__)


def names_all_sizes(settings: ModelConfig) -> bool:
    """Return whether the settings have all sizes, so that no folder needs to be read."""
    if settings.name == HF:
        return False
    sizes = find_spec(settings).sizes
    return not sizes.missing(given_sizes(settings, of=sizes))


def find_export(path: Path) -> Path:
    """Return the Hugging Face folder that a run wrote beside its last step, if `path` is this step.

    torchtitan 0.2 writes it in the step's place. Any other path is returned as it is.
    """
    export = path.parent / EXPORT / path.name
    return path if is_hf_folder(path) or not is_hf_folder(export) else export


def read_model(path: Path, settings: ModelConfig) -> ModelConfig:
    """Return the family and sizes of the model in a Hugging Face folder.

    The name in `settings` is a family, or "hf" for the family of the folder. Raises UserError if
    the folder does not exist, or its model is not built here.
    """
    if not path.is_dir():
        raise missing_folder(path)
    config = read_config(path)
    if settings.name == HF:
        spec = family_of(config, models=MODELS)
    elif (spec := find_spec(settings)).read is not None:
        return to_settings(spec, spec.read(read_json(path / CONFIG)))  # nulls count
    else:
        check_family(config, format=spec.hf)
    return to_settings(spec, architecture_of(config, spec=spec))


def with_model_of(stored_model: ModelConfig, settings: ModelConfig) -> ModelConfig:
    """Return the settings with family and sizes of `stored_model`, where these give none."""
    sizes_type = AllSizes if settings.name == HF else find_spec(settings).sizes
    options = {**stored_model.options, **settings.options}
    stored, own = (
        given_sizes(replace(model, options={}), of=sizes_type) for model in (stored_model, settings)
    )
    own_scaling = settings.rope_scaling.type != "flavor"
    scaling = settings.rope_scaling if own_scaling else stored_model.rope_scaling
    return replace(
        settings,
        name=stored_model.name,
        flavor=HF,
        rope_scaling=scaling,
        options=options,
        **{**stored, **own},
    )


def missing_folder(path: Path) -> ConfigError:
    """Return the error for a Hugging Face folder that does not exist."""
    remedy = "name a folder with config.json and safetensors files, or a model of the Hub"
    return ConfigError.at("checkpoint.initial_load_path", f"folder {path} does not exist; {remedy}")


def check_names_and_sizes(model: LanguageModel, *, spec: ModelSpec, keys: Sequence[str]) -> None:
    """Check that Hugging Face's files can hold the full `model`, as the `keys` of [checkpoint] ask;
    raise ConfigError if its format has no names for the parameters, or cannot store the sizes."""
    names = Names(spec.hf, model.config)
    problem = names.find_mismatch([name for name, _ in model.named_parameters()])
    if problem := problem or find_inexpressible(model.config, spec.hf):
        rule = f"needs a model that Hugging Face's format of {spec.name} can store: {problem}"
        raise ConfigError([Violation((f"checkpoint.{key}",), rule) for key in keys])


def chosen_rotation(settings: ModelConfig) -> set[str]:
    """Return the rope settings that a job overrides, so that the folder's may differ."""
    chosen = {
        "rope_theta": settings.rope_theta is not None,
        "rope_scaling": settings.rope_scaling.type != "flavor",
    }
    return {name for name, is_set in chosen.items() if is_set}
