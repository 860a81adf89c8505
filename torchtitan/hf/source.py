"""The model and the weights that a job starts from, where another program wrote them.

`checkpoint.initial_load_path` names a checkpoint of this library, a Hugging Face folder, a file of
torch.save, or a DCP folder.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError, ConfigError, Mistakes
from torchtitan.base.urls import is_url
from torchtitan.checkpoint.manager import EXPORT
from torchtitan.checkpoint.rows import HeadDim
from torchtitan.checkpoint.settings import WEIGHT_FILES, CheckpointConfig
from torchtitan.checkpoint.source import (
    Checkpoint,
    DCPFolder,
    ParameterFilter,
    WeightSource,
    row_order,
    stated_order,
)
from torchtitan.checkpoint.start import LoadMode
from torchtitan.checkpoint.state import VOCABULARY
from torchtitan.checkpoint.steps import resolve_step
from torchtitan.checkpoint.storage import step_of
from torchtitan.hf.config import (
    architecture_of,
    check_family,
    family_of,
    find_inexpressible,
    read_config,
    read_scaling,
    rope_table,
)
from torchtitan.hf.file import open_file
from torchtitan.hf.folder import is_hf_folder, open_folder
from torchtitan.hf.names import CONFIG, Names
from torchtitan.hf.tokenizer_files import warn_of_other_tokenizer
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.models.families import MODELS, find_spec, to_settings
from torchtitan.models.interface import LanguageModel
from torchtitan.models.settings import ALL_SIZES, HF, ModelConfig, given_sizes
from torchtitan.models.sizes import DecoderConfig, RopeScaling
from torchtitan.models.spec import ModelSpec

logger = logging.getLogger(__name__)
PATH = "checkpoint.initial_load_path"
FETCHED = "initial"
"""Inside the folder of checkpoints: the step that a URL as initial_load_path names."""
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


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

    Args:
        path: The folder.
        settings: Its `name` is a family, or "hf" for that of the folder.

    Raises:
        UserError: The folder does not exist, or its model is not built here.
    """
    if not path.is_dir():
        raise missing_folder(path)
    config = read_config(path)
    if settings.name == HF:
        spec = family_of(config, models=MODELS)
    else:
        spec = find_spec(settings)
        check_family(config, format=spec.hf)
    return to_settings(spec, architecture_of(config, spec=spec))


def with_model_of(found: ModelConfig, settings: ModelConfig) -> ModelConfig:
    """Return the settings with family and sizes of `found`, where they do not give their own."""
    kind = ALL_SIZES if settings.name == HF else find_spec(settings).sizes
    sizes = {**given_sizes(found, of=kind), **given_sizes(settings, of=kind)}
    own_scaling = settings.rope_scaling.type != "flavor"
    scaling = settings.rope_scaling if own_scaling else found.rope_scaling
    return replace(settings, name=found.name, rope_scaling=scaling, **sizes)


def warn_beyond_positions(
    folder: Path, *, scaling: RopeScaling | None, lengths: Mapping[str, int]
) -> None:
    """Log a warning if sequences are longer than a Hugging Face folder states for its model.

    Args:
        folder: The folder.
        scaling: The model's. With YaRN's, `warn_beyond_rope` does this; with another one than the
            folder's, the folder does not say how far it reaches.
        lengths: Tokens of the sequences by key.
    """
    config = read_config(folder)
    stated = config.get("max_position_embeddings", math.inf)
    is_folders = scaling is not None and scaling == read_scaling(rope_table(config))
    if scaling is not None and not (scaling.type == "llama3" and is_folders):
        return
    for key, seq_len in lengths.items():
        if stated < seq_len:
            text = "%s is %d, beyond max_position_embeddings = %d in %s"
            logger.warning(text, key, seq_len, stated, folder / CONFIG)


def missing_folder(path: Path) -> ConfigError:
    """Return the error for a Hugging Face folder that does not exist."""
    remedy = "name a folder with config.json and safetensors files"
    if HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
        remedy = (
            f'nothing is downloaded here: run "hf download {path} --local-dir DIR", and name DIR'
        )
    return ConfigError.at(PATH, f"there is no folder {path}; {remedy}")


def check_names_and_sizes(model: LanguageModel, *, spec: ModelSpec, keys: Sequence[str]) -> None:
    """Check that Hugging Face's files can hold the model.

    Args:
        model: The full model.
        spec: Its family.
        keys: Keys of [checkpoint] that ask for it.

    Raises:
        ConfigError: Its format has no names for the parameters, or cannot store the sizes.
    """
    mismatch = Names(spec.hf, model.config).find_mismatch([n for n, _ in model.named_parameters()])
    problem = None if mismatch else find_inexpressible(model.config, spec.hf)
    mistakes = Mistakes()
    for key in keys:
        if problem is not None:
            mistakes.add(
                f"checkpoint.{key}",
                f"needs sizes that Hugging Face's format can store: {problem}; change [model]",
            )
        if mismatch is not None:
            mistakes.add(
                f"checkpoint.{key}",
                f"needs Hugging Face's names of all parameters in the ModelSpec of {spec.name} "
                f"(hf): {mismatch}",
            )
    mistakes.report()


def chosen_rotation(settings: ModelConfig) -> set[str]:
    """Return the rope settings that a job overrides, so that the folder's may differ."""
    chosen = {
        "rope_theta": settings.rope_theta is not None,
        "rope_scaling": settings.rope_scaling.type != "flavor",
    }
    return {name for name, is_set in chosen.items() if is_set}


def open_initial(
    requested: LoadMode,
    *,
    settings: CheckpointConfig,
    model: ModelConfig,
    spec: ModelSpec,
    architecture: DecoderConfig,
    lengths: Mapping[str, int],
    optional: Callable[[str], bool] | None,
    folder: Path,
    group: dist.ProcessGroup,
) -> WeightSource:
    """Open what `checkpoint.initial_load_path` names.

    Args:
        requested: What is to be loaded.
        settings: The section [checkpoint].
        model: The section [model].
        spec: Family of the model.
        architecture: Sizes of the model.
        lengths: Tokens per sequence, by the key that sets them.
        optional: Selects parameters that the source may lack.
        folder: Parent of the run's own `step-N` folders.
        group: All ranks.

    Raises:
        CheckpointError: It does not exist, is damaged, or is of another model or kind than
            the settings name.
    """
    assert settings.initial_load_path is not None
    path = Path(settings.initial_load_path)
    if is_url(settings.initial_load_path):
        path = _fetch(settings, folder=folder, group=group)
        settings = replace(settings, load_step=-1)  # it chose what was fetched
    is_file = path.suffix in WEIGHT_FILES
    if settings.load_step != -1 and (is_file or settings.initial_load_in_hf):
        raise ConfigError.at(
            ("checkpoint.load_step", PATH),
            f"chooses among the steps of a run, got {path}, which has none; remove it",
        )
    chosen = ParameterFilter(
        exclude=() if requested == "recover" else settings.exclude_from_loading,
        may_grow=VOCABULARY if settings.grow_vocab else (),
        optional=optional if requested == "finetune" else None,
    )
    how: dict[str, Any] = {"filter": chosen, "group": group}
    sizes: dict[str, Any] = {"spec": spec, "architecture": architecture}
    if is_file:
        return open_file(path, rope=settings.initial_load_rope, **sizes, **how)
    if settings.initial_load_in_hf:
        return _open_folder(path, model=model, lengths=lengths, **sizes, **how)
    if on_first_rank(lambda: is_hf_folder(path), group=group):
        raise CheckpointError(
            f"{PATH} {path} is a Hugging Face folder; to start from its weights write "
            f"checkpoint.initial_load_in_hf = true"
        )
    return _open_step(path, settings=settings, **sizes, **how)


def _open_folder(
    path: Path,
    *,
    model: ModelConfig,
    architecture: DecoderConfig,
    lengths: Mapping[str, int],
    group: dist.ProcessGroup,
    **how: Any,
) -> WeightSource:
    """Open a Hugging Face folder; warn of another tokenizer, and of too long sequences."""
    if not on_first_rank(path.is_dir, group=group):
        raise missing_folder(path)
    how |= {"architecture": architecture, "group": group}
    found = open_folder(path, may_differ=chosen_rotation(model), **how)
    on_first_rank(lambda: warn_of_other_tokenizer(model.tokenizer_path, base=path), group=group)
    warn_beyond_positions(path, scaling=architecture.rope_scaling, lengths=lengths)
    return found


def _open_step(
    path: Path,
    *,
    settings: CheckpointConfig,
    spec: ModelSpec,
    architecture: DecoderConfig,
    filter: ParameterFilter,
    group: dist.ProcessGroup,
) -> WeightSource:
    """Open a checkpoint of this library, or a DCP folder."""
    step, is_ours = resolve_step(
        path,
        subfolder=settings.local_folder,
        load_step=settings.load_step,
        verifies=settings.verify_on_load,
        group=group,
    )
    if is_ours:
        if settings.initial_load_rope != "auto":
            raise CheckpointError(
                f"checkpoint.initial_load_rope is for weights of other programs, and {step} is of "
                f"this library, which knows the order of its rows; remove it"
            )
        return Checkpoint(path=step, filter=filter, group=group)
    logger.info("%s has no sizes: they are those of model.flavor", step)
    order = row_order(
        step,
        stated=on_first_rank(lambda: stated_order(step), group=group),
        setting=settings.initial_load_rope,
        spec=spec,
        may_assume=True,
    )
    head_dim: HeadDim = lambda name: None  # noqa: E731
    if order != "interleaved":
        head_dim = Names(spec.hf, architecture).rope_head_dim
    return DCPFolder(path=step, rope_head_dim=head_dim, filter=filter, group=group)


def _fetch(settings: CheckpointConfig, *, folder: Path, group: dist.ProcessGroup) -> Path:
    """Download the step that the URL in initial_load_path means, and return its folder."""
    from torchtitan.checkpoint.remote import RemoteCheckpoints

    url, number = str(settings.initial_load_path).rstrip("/"), settings.load_step
    if (named := step_of(PurePosixPath(url))) is not None:
        url, number = url.rpartition("/")[0], named
    remote = RemoteCheckpoints.open(
        url, key=PATH, settings=settings, folder=folder / FETCHED, group=group
    )
    return remote.fetch(number)
