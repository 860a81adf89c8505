"""What is evaluated: a model, and what its folder says of the texts that it was made for.

A run's step says how its training cut text. A Hugging Face folder says how many positions its model
takes, and its begin token; a model that was trained here on text has never seen a token there but
the one that ended the document before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.api import open_generator
from torchtitan.checkpoint.storage import read_manifest
from torchtitan.data.hf_tokenizer import read_tokenizer_config, special_token
from torchtitan.data.settings import TrainingConfig
from torchtitan.generate.generator import Generator
from torchtitan.hf.config import read_config
from torchtitan.hf.names import CONFIG
from torchtitan.hf.tokenizer_files import tokenizer_file
from torchtitan.resume_rules import find_run_step, read_settings

UNSAID = 2048
"""Tokens of a sequence where a Hugging Face folder does not say how many it takes, and the most
that perplexity takes of one if it is not told to."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and what its folder says of it."""

    folder: Path
    """The step or the Hugging Face folder that was read."""
    step: int | None
    """None: a Hugging Face folder."""
    generator: Generator
    cut: TrainingConfig
    """How the text of held-out files is cut if nothing else is said, as in the training."""
    positions: int
    """Tokens of the longest sequence that it was trained on, or that its config.json names."""
    first_id: int
    """What stands before a text of which the first token is predicted."""


def open_subject(
    path: Path,
    *,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    verify: bool = True,
    tokenizer: str | None = None,
    **options: Any,
) -> Subject:
    """Open what `path` names; the arguments are those of `open_generator`.

    Raises:
        UserError: As `open_generator` raises.
    """
    options |= {"device": device, "mesh": mesh, "tokenizer": tokenizer}
    if (path / CONFIG).is_file():
        generator = open_generator(path, **options)
        positions = read_config(path).get("max_position_embeddings", UNSAID)
        return Subject(
            folder=path,
            step=None,
            generator=generator,
            cut=TrainingConfig(seq_len=min(positions, UNSAID)),
            positions=positions,
            first_id=_begin_token(tokenizer or str(path), generator),
        )
    step = find_run_step(path, verify=verify, group=None if mesh is None else mesh.get_group())
    generator = open_generator(step, verify=False, **options)
    training = read_settings(step).training
    return Subject(
        folder=step,
        step=read_manifest(step)["step"],
        generator=generator,
        cut=TrainingConfig(
            seq_len=training.seq_len,
            attn_mask_type=training.attn_mask_type,
            reset_positions=training.reset_positions,
        ),
        positions=training.seq_len,
        first_id=generator.tokenizer.eos_id,
    )


def _begin_token(tokenizer_path: str, generator: Generator) -> int:
    """Return the begin token, or the end token where there is none."""
    file, tokenizer = tokenizer_file(tokenizer_path), generator.tokenizer
    config = {} if file is None else read_tokenizer_config(file.with_name("tokenizer_config.json"))
    named = special_token(config, "bos_token") or ""
    return tokenizer.special_tokens.get(named, tokenizer.eos_id)
