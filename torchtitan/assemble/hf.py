"""What a folder of Hugging Face holds beside the weights: from the job, and from its beginning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan.assemble.layout import check_hf, find_model
from torchtitan.checkpoint.hf import CONFIG
from torchtitan.checkpoint.hf_config import CARRIED, read_config
from torchtitan.checkpoint.hf_lora import Factors
from torchtitan.checkpoint.hf_write import HFExport
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import Config
from torchtitan.lora.settings import LoRAConfig
from torchtitan.models.settings import ModelConfig

logger = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
BESIDE_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
)


def describe_export(config: Config, *, dtype: torch.dtype | None) -> HFExport:
    """Say how a job's weights go to Hugging Face, in `dtype`, None: as they are stored.

    Raises:
        UserError: The model has no such files, or the job's tokenizer is not there.
    """
    spec, architecture = find_model(config.model)
    ours = [name for name, _ in spec.build_meta(architecture).named_parameters()]
    check_hf(spec, ours, of=architecture, key="an export for Hugging Face")
    return HFExport(
        names=spec.hf,
        architecture=architecture,
        dtype=dtype,
        carried=_carried(config),
        factors=_factors(config.lora, base=config.checkpoint.initial_load_path),
        files={**_tokenizer_files(config.model.tokenizer_path), **_trained_template(config)},
    )


def _factors(settings: LoRAConfig, *, base: str | None) -> Factors | None:
    if not settings.rank:
        return None
    alone = settings.save == "adapter"
    return Factors(rank=settings.rank, alpha=settings.alpha, alone=alone, base=base)


def _trained_template(config: Config) -> Mapping[str, Path]:
    """Return the chat template of the examples; transformers reads this file first."""
    training = config.training
    if training.chat_template is None:  # given with examples alone
        return {}
    return {CHAT_TEMPLATE: Path(training.chat_template).expanduser()}


def warn_of_other_tokenizer(config: Config, *, origin: Path) -> None:
    """Warn where a run begins from a folder whose tokenizer is not the job's: ids that mean other
    text train without an error."""
    tokenizer_path = config.model.tokenizer_path
    theirs, ours = origin / TOKENIZER, tokenizer_file(tokenizer_path)
    if Path(tokenizer_path).expanduser().resolve().is_relative_to(origin.resolve()):
        return  # the same one, though it may be in another format
    if theirs.is_file() and (ours is None or ours.read_bytes() != theirs.read_bytes()):
        logger.warning(
            "%s is not the tokenizer of this job, %s, whose ids may mean other text to these "
            'weights; to use it write model.tokenizer_path = "%s"',
            theirs,
            tokenizer_path,
            origin,
        )


def chosen_rotation(settings: ModelConfig) -> set[str]:
    """Return which sizes of the rotation a job sets itself: it may start from other ones."""
    chosen = {
        "rope_theta": settings.rope_theta is not None,
        "rope_scaling": settings.rope_scaling.type != "flavor",
    }
    return {name for name, is_set in chosen.items() if is_set}


def _carried(config: Config) -> dict[str, Any]:
    """Return what config.json says beside the sizes: what it said where the run began from one,
    else what the job knows."""
    seq_len = config.training.seq_len
    carried: dict[str, Any] = dict.fromkeys(CARRIED)
    carried["max_position_embeddings"] = seq_len
    carried["eos_token_id"] = build_tokenizer(config.model.tokenizer_path).eos_id
    checkpoint = config.checkpoint
    if checkpoint.initial_load_in_hf and checkpoint.initial_load_path is not None:
        origin = Path(checkpoint.initial_load_path)
        if not (origin / CONFIG).is_file():
            logger.warning("%s is gone: its token ids and context length are not known", origin)
            return carried
        carried |= {key: value for key, value in read_config(origin).items() if key in CARRIED}
        carried["max_position_embeddings"] = max(seq_len, carried["max_position_embeddings"])
    return carried


def tokenizer_file(tokenizer_path: str) -> Path | None:
    """Return the tokenizer.json that a job names; None: its tokenizer is of another kind."""
    path = Path(tokenizer_path).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    return file if file.suffix == ".json" and file.is_file() else None


def _tokenizer_files(tokenizer_path: str) -> Mapping[str, Path]:
    file = tokenizer_file(tokenizer_path)
    if file is None:
        logger.info("The export has no tokenizer: %s is none of Hugging Face", tokenizer_path)
        return {}
    beside = {name: file.with_name(name) for name in BESIDE_TOKENIZER}
    return {TOKENIZER: file, **{name: place for name, place in beside.items() if place.is_file()}}
