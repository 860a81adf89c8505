"""A trained model that writes text: from a step of a run, or from a folder of Hugging Face.

Both are read by the code that a run reads them with, each rank its own part of the matrices and
nothing else. A model is split by tensor parallelism alone: it is the layout in which all ranks work
on one token. Its residual stream is copied, not split along the sequence, which is one token long.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.assemble.hf import GENERATION_CONFIG, tokenizer_file
from torchtitan.assemble.layout import find_model
from torchtitan.assemble.steps import find_step
from torchtitan.base.errors import CheckpointError, ConfigError, DataError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.files import Content, read_json
from torchtitan.checkpoint.hf import CONFIG
from torchtitan.checkpoint.hf_config import architecture_of, family_of, read_config
from torchtitan.checkpoint.hf_folder import open_folder
from torchtitan.checkpoint.hf_read import read_weights
from torchtitan.data.chat import ChatTemplate
from torchtitan.data.chat_files import find_template
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from torchtitan.job import Config
from torchtitan.lora.settings import LoRAConfig
from torchtitan.models.contract import LanguageModel
from torchtitan.models.families import MODELS
from torchtitan.models.lora import apply_lora
from torchtitan.models.spec import DecoderConfig, ModelSpec
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.tensor import apply_tensor_parallel, find_misfit, find_unplanned
from torchtitan.trajectory import Job

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A model, and what makes text of its tokens."""

    model: LanguageModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """Of its chats; None: it has none, or none was asked for."""
    stop_ids: frozenset[int]
    """Tokens that end a text."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Weights on disk, and all that is said of them there."""

    spec: ModelSpec
    architecture: DecoderConfig
    dtype: str
    """As the weights are stored."""
    tokenizer: str
    chat_template: str | None
    """The file that a job named."""
    stop_ids: frozenset[int]
    """Tokens that end a text, beside those that the tokenizer's folder knows."""
    read: Callable[[Mapping[str, Tensor]], None]
    """Fills parameters by their names."""
    lora: LoRAConfig | None = None
    """Low-rank factors beside its matrices, where there are any."""


def open_writer(
    path: Path,
    *,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    verify: bool = True,
    tokenizer: str | None = None,
    chats: bool = False,
    chat_template: str | None = None,
    dtype: str | None = None,
) -> Writer:
    """Build the model that a folder holds, with its weights, split over the ranks of `mesh`.

    Tokenizer, template and type of the weights are the folder's where they are not given; without
    `chats` a template is not looked for.

    Raises:
        UserError: The folder is damaged or of no model, its tokenizer is not there, or the model
            cannot be split over so many ranks.
    """
    group = None if mesh is None else mesh.get_group()
    # what is no folder of theirs, and what is none of ours, says so itself
    is_theirs = (path / CONFIG).is_file()
    source = _of_hugging_face(path, group) if is_theirs else _of_run(path, group, verify=verify)
    tokenizer_path = tokenizer or source.tokenizer
    ids = _find_tokenizer(tokenizer_path)
    check_vocabulary(ids, model_vocab_size=source.architecture.vocab_size)
    template = None
    if chats:
        setting = chat_template or source.chat_template
        template = find_template(setting, tokenizer=ids, tokenizer_path=tokenizer_path)
    file = tokenizer_file(tokenizer_path)
    stop_ids = frozenset() if file is None else _stop_ids(file.with_name(GENERATION_CONFIG))
    model = _build(source, mesh=mesh, device=device)
    with warnings.catch_warnings():
        # one process may be what is meant here
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        source.read(dict(model.named_parameters()))
    return Writer(
        model=model.to(getattr(torch, dtype or source.dtype)),
        tokenizer=ids,
        template=template,
        stop_ids=source.stop_ids | stop_ids | {ids.eos_id},
    )


def _find_tokenizer(path: str) -> Tokenizer:
    try:
        return build_tokenizer(path)
    except DataError as error:
        raise DataError(f"{error}; name the tokenizer of these weights by --tokenizer") from error


def _build(source: Source, *, mesh: DeviceMesh | None, device: torch.device) -> LanguageModel:
    """Build the model without weights."""
    model = source.spec.build_meta(source.architecture).to(getattr(torch, source.dtype))
    if source.lora is not None:
        apply_lora(
            model,
            rank=source.lora.rank,
            alpha=source.lora.alpha,
            patterns=source.lora.modules,
        )
    if "cache" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"to write text a model must take a cache of keys and values, and the forward of "
            f"{source.spec.name} has no argument `cache`; docs/models.md says what it is"
        )
    if mesh is not None:
        if unplanned := find_unplanned(model, plan=source.spec.tensor_plan):
            raise ConfigError(f"the number of ranks must be 1, got {mesh.size()}: {unplanned}")
        if misfit := find_misfit(source.architecture, tp=mesh.size()):
            raise ConfigError(
                f"the number of ranks must divide the model's heads, feed-forward width and "
                f"vocabulary, got {misfit}; start as many ranks with torchrun"
            )
        assert model.output is not None
        model.output.loss = build_loss(None)  # nobody asks for it, but the head is split with it
        apply_tensor_parallel(
            model,
            mesh=mesh,
            plan=source.spec.tensor_plan,
            sequence_parallel=False,
            loss_parallel=False,
        )
    return model.to_empty(device=device)


def _of_run(path: Path, group: dist.ProcessGroup | None, *, verify: bool) -> Source:
    step = find_step(path, verify=verify, group=group)
    config = read_settings(step)
    spec, architecture = find_model(config.model)
    return Source(
        spec=spec,
        architecture=architecture,
        dtype=config.training.dtype,
        tokenizer=config.model.tokenizer_path,
        chat_template=config.training.chat_template,
        stop_ids=frozenset(),
        read=lambda into: storage.read_tensors(step, "model", into=into, group=group),
        lora=config.lora if config.lora.rank else None,
    )


def _of_hugging_face(path: Path, group: dist.ProcessGroup | None) -> Source:
    config = read_config(path)
    spec = family_of(config, models=MODELS)
    architecture = architecture_of(config, spec=spec)
    folder = open_folder(path, spec=spec, architecture=architecture, group=group)
    dtype = config.get("dtype", config.get("torch_dtype", "float32"))
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{config.path}: the type of the weights must be one of {', '.join(DTYPES)}, got "
            f"{dtype!r}; take a model in one of these"
        )
    return Source(
        spec=spec,
        architecture=architecture,
        dtype=dtype,
        tokenizer=str(path),
        chat_template=None,
        stop_ids=_stop_ids(path / GENERATION_CONFIG) or _end_tokens(config),
        read=lambda into: read_weights(folder, into=into, group=group),
    )


def read_settings(step: Path) -> Config:
    """Return the settings that a step was saved under, by its manifest."""
    manifest = storage.read_manifest(step)
    return Job.stored(manifest["config"], file=manifest.path).config


def _stop_ids(file: Path) -> frozenset[int]:
    """Return the tokens that end a text by a generation_config.json, none where there is none."""
    return _end_tokens(read_json(file)) if file.is_file() else frozenset()


def _end_tokens(content: Content) -> frozenset[int]:
    """Return the one or more ids that a file of theirs gives, or none where it gives null."""
    given = content.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{content.path} is damaged: eos_token_id must be a number or a list of numbers, got "
            f"{str(given)[:60]!r}; get it again"
        )
    return frozenset(ids)
