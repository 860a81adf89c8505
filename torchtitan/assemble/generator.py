"""A model that generates text: from a step of a run, or from a Hugging Face folder of any size."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.base.device import device_type, local_device
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.checkpoint.steps import resolve_step
from torchtitan.checkpoint.storage import read_manifest
from torchtitan.finetune.lora import apply_lora
from torchtitan.generate.generator import DTYPES, Generator, Pretrained, build_generator
from torchtitan.hf.beside import end_tokens, stop_ids, tokenizer_file
from torchtitan.hf.config import architecture_of, family_of, read_config
from torchtitan.hf.folder import open_folder
from torchtitan.hf.names import ADAPTER_CONFIG, CONFIG
from torchtitan.job import Config
from torchtitan.layout import find_model
from torchtitan.mesh.ranks import init_process_group, read_rank_info
from torchtitan.mesh.settings import CommConfig
from torchtitan.models.families import MODELS
from torchtitan.resume_rules import CONFIG_FILE, Job


def join_ranks() -> tuple[torch.device, DeviceMesh | None]:
    """Return this process's device, and the mesh of the ranks that torchrun started beside it, to
    share a model's matrices; None: it is alone."""
    launch = read_rank_info(os.environ)
    device = local_device(launch.local_rank)
    if launch.world_size == 1:
        return device, None
    settings = CommConfig(trace_buf_size=0)
    init_process_group(launch, device_type=device_type(), settings=settings, dump_folder=Path())
    return device, init_device_mesh(device.type, (launch.world_size,), mesh_dim_names=("tp",))


def open_generator(
    path: Path,
    *,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    verify: bool = True,
    tokenizer: str | None = None,
    chats: bool = False,
    chat_template: str | None = None,
    dtype: str | None = None,
) -> Generator:
    """Build the model that a folder holds, with its weights, split over the ranks of `mesh`.

    Tokenizer, template and type of the weights are the folder's where they are not given; without
    `chats` a template is not looked for.

    Raises:
        UserError: The folder is damaged or holds no model, its tokenizer is not there, or the model
            cannot be split over so many ranks.
    """
    found = find_pretrained(path, verify=verify, group=None if mesh is None else mesh.get_group())
    tokenizer = tokenizer or found.tokenizer
    file = tokenizer_file(tokenizer)
    found = replace(
        found,
        tokenizer=tokenizer,
        chat_template=chat_template or found.chat_template,
        stop_ids=found.stop_ids | (frozenset() if file is None else stop_ids(file.parent)),
    )
    return build_generator(found, device=device, mesh=mesh, chats=chats, dtype=dtype)


def find_pretrained(
    path: Path, *, verify: bool = True, group: dist.ProcessGroup | None = None
) -> Pretrained:
    """Return the model that a folder holds, without memory yet, and where its weights are.

    Raises:
        UserError: The folder is damaged or holds no model.
    """
    # a folder of neither kind says so itself
    is_theirs = (path / CONFIG).is_file()
    return _of_hugging_face(path, group) if is_theirs else _of_run(path, group, verify=verify)


def _of_run(path: Path, group: dist.ProcessGroup | None, *, verify: bool) -> Pretrained:
    step = find_run_step(path, verify=verify, group=group)
    config = read_settings(step)
    spec, architecture = find_model(config.model)
    model, lora = spec.build_meta(architecture), config.lora
    if lora.rank:
        apply_lora(model, rank=lora.rank, alpha=lora.alpha, patterns=lora.modules)
    return Pretrained(
        spec=spec,
        model=model,
        weights=Checkpoint(path=step, group=group),
        dtype=config.training.dtype,
        tokenizer=config.model.tokenizer_path,
        chat_template=config.training.chat_template,
        stop_ids=frozenset(),
        context=config.training.seq_len,
    )


def _of_hugging_face(path: Path, group: dist.ProcessGroup | None) -> Pretrained:
    config = read_config(path)
    spec = family_of(config, models=MODELS)
    architecture = architecture_of(config, spec=spec)
    dtype = config.get("dtype", config.get("torch_dtype", "float32"))
    weights = open_folder(path, spec=spec, architecture=architecture, group=group)
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{config.path}: the type of the weights must be one of {', '.join(DTYPES)}, got "
            f"{dtype!r}; take a model in one of these"
        )
    return Pretrained(
        spec=spec,
        model=spec.build_meta(architecture),
        weights=weights,
        dtype=dtype,
        tokenizer=str(path),
        chat_template=None,
        stop_ids=stop_ids(path) or end_tokens(config),
        context=config.get("max_position_embeddings"),
    )


def find_run_step(path: Path, *, verify: bool, group: dist.ProcessGroup | None = None) -> Path:
    """Return the step of ours that `path` means, with the settings that it was saved under.

    Raises:
        CheckpointError: There is none, or the one that was named is damaged.
    """
    if (path / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{path} holds a LoRA adapter without the model: name the step of the run that trained "
            f'it, or let that run export with lora.export_format = "merged"'
        )
    stored, subfolder = path / CONFIG_FILE, "checkpoint"
    if stored.is_file():
        subfolder = Job.stored_in(stored).config.checkpoint.local_folder
    step, is_ours = resolve_step(path, subfolder=subfolder, verifies=verify, group=group)
    if not is_ours:
        raise CheckpointError(
            f"{step} holds weights without the settings of a run; name a step that this library "
            f"saved, or a folder of Hugging Face"
        )
    return step


def read_settings(step: Path) -> Config:
    """Return the settings that a step was saved under, by its manifest."""
    manifest = read_manifest(step)
    return Job.stored(manifest["config"], file=manifest.path).config
