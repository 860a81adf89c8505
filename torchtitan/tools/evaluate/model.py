"""Evaluate the model of a run or of a Hugging Face folder.

A run's step stores how its training cut text. A Hugging Face folder has the model's number of
positions and its BOS token. A model trained by torchtitan on text has only seen the end token of
the previous document before a text.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan import __version__
from torchtitan.api import load_generator
from torchtitan.base.errors import ConfigError
from torchtitan.checkpoint.checksums import read_manifest
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.tokenizer import read_tokenizer_config, special_token
from torchtitan.generate.generator import Generator
from torchtitan.hf.config import read_config
from torchtitan.hf.names import CONFIG, tokenizer_file
from torchtitan.resume_rules import find_run_step, read_settings
from torchtitan.tools.evaluate.perplexity import measure, open_domain
from torchtitan.tools.generate import join_tensor_parallel
from torchtitan.tools.verbs import load_args

CUT = ("seq_len", "dataset_text_key", "dataset_text_template", "dataset_cache")
"""Options that override how text is cut."""
UNKNOWN_POSITIONS = 2048
"""Tokens per sequence if config.json has no max_position_embeddings, and at most by default."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to evaluate."""

    folder: Path
    """The step, or the Hugging Face folder, which has no number of a step."""
    step: int | None
    generator: Generator
    cut: TrainingConfig
    """How text is cut by default, as in the training."""
    positions: int
    """Tokens of the longest sequence of the training, or max_position_embeddings."""
    first_id: int
    """Token before a text whose first token is predicted."""


def open_subject(
    path: Path,
    *,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    verify: bool = True,
    tokenizer: str | None = None,
    **options: Any,
) -> Subject:
    """Open the model of a folder. Arguments and errors as of `load_generator`."""
    folder, is_run = path, not (path / CONFIG).is_file()
    if is_run:
        group = None if mesh is None else mesh.get_group()
        folder = find_run_step(path, verify=verify, group=group)
    options |= {"device": device, "mesh": mesh, "tokenizer": tokenizer}
    generator = load_generator(folder, verify=False, **options)
    own, step = generator.tokenizer, None
    begin = ""
    if is_run:
        training, step = read_settings(folder).training, read_manifest(folder)["step"]
        positions = training.seq_len
        cut = TrainingConfig(
            seq_len=positions,
            attn_mask_type=training.attn_mask_type,
            reset_positions=training.reset_positions,
        )
    else:
        positions = read_config(path).get("max_position_embeddings", UNKNOWN_POSITIONS)
        cut = TrainingConfig(seq_len=min(positions, UNKNOWN_POSITIONS))
        if (file := tokenizer_file(tokenizer or str(path))) is not None:
            config = read_tokenizer_config(file.parent / "tokenizer_config.json")
            begin = special_token(config, "bos_token") or ""
    return Subject(
        folder=folder,
        step=step,
        generator=generator,
        cut=cut,
        positions=positions,
        first_id=own.special_tokens.get(begin, own.eos_id),
    )


def evaluate(args: argparse.Namespace, files: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return all figures and the settings that they depend on; raise UserError if an option, a
    file, a task or the model is invalid."""
    device, mesh = join_tensor_parallel()
    if args.tasks:
        from torchtitan.tools.evaluate.harness import Adapter, find_tasks, run_tasks

        manager = find_tasks(args.tasks, include_path=args.include_path)
    subject = open_subject(
        args.checkpoint,
        device=device,
        mesh=mesh,
        chats=args.apply_chat_template,
        **load_args(args),
    )
    model, tokenizer = subject.generator.model, subject.generator.tokenizer
    max_length = args.seq_len or subject.positions
    if subject.step is None and max_length > subject.positions:
        rule = f"must be at most {subject.positions}, the positions of the model, got {max_length}"
        raise ConfigError.at("--seq_len", rule)
    if args.apply_chat_template and subject.generator.template is None:
        raise ConfigError.at("--apply_chat_template", "needs a template, such as --chat_template")
    overrides = {key: v for key in CUT if (v := getattr(args, key)) is not None}
    cut = replace(subject.cut, dataset="files", dataset_path=(".",), **overrides)
    if wrong := [*cut.violations()]:
        raise ConfigError(wrong)
    # all are opened before the first is measured
    domains = {n: open_domain(n, f, cut=cut, tokenizer=tokenizer) for n, f in files.items()}
    options = {"cut": cut, "tokenizer": tokenizer, "batch_size": args.batch_size}
    perplexity = {n: measure(model, n, samples, **options) for n, samples in domains.items()}
    tasks: Mapping[str, Any] = {}
    if args.tasks:
        adapter = Adapter(
            subject.generator,
            first_id=subject.first_id,
            max_length=max_length,
            batch_size=args.batch_size,
            chats=args.apply_chat_template,
        )
        tasks = run_tasks(
            adapter,
            args.tasks,
            task_manager=manager,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            apply_chat_template=args.apply_chat_template,
        )
    return {
        "checkpoint": str(subject.folder),
        "step": subject.step,
        "perplexity": perplexity,
        "tasks": tasks,
        "settings": {
            **{key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()},
            "perplexity": files,
            "seq_len": cut.seq_len if args.perplexity else None,
            "seq_len_of_tasks": max_length if args.tasks else None,
            "attn_mask_type": cut.attn_mask_type,
            "reset_positions": cut.reset_positions,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "version": __version__,
            "num_ranks": 1 if mesh is None else mesh.size(),
        },
    }
