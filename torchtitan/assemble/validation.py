"""What a run is measured on: data of its own, read in the layout of the training."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace

import torch

from torchtitan.assemble.data import build_samples
from torchtitan.base.log import amount
from torchtitan.base.own import is_import_path
from torchtitan.data.dataset import PadToBatch
from torchtitan.data.files import Once, alone
from torchtitan.data.loader import Loader, MapSamples
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.job import Config, own_sections
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.ranks import check_data_alike
from torchtitan.models.interface import ModelParts
from torchtitan.parallel.context.layout import SequenceShard
from torchtitan.parallel.execution import Execution
from torchtitan.validate import Validator

logger = logging.getLogger(__name__)
SEED = 0  # not the run's: runs with other seeds are measured on the same samples
OWN_KEYS = ("dataset", "dataset_path", "seq_len")


def build_validator(
    config: Config,
    *,
    mesh: Mesh,
    model: ModelParts,
    execution: Execution,
    shard: SequenceShard,
    device: torch.device,
    once: Once,
) -> Validator | None:
    """Build what validates the run; None where that is off. `once`: what looks for files.

    Raises:
        DataError: Data are missing, empty, damaged, too short, or not the same on all ranks.
    """
    validation = config.validation
    if not validation.enable:
        return None
    source = describe_source(config)
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    dataset = build_held_out(config, source=source, tokenizer=tokenizer, once=once)
    check_data_alike(dataset.fingerprint)
    batches = PadToBatch(
        dataset,
        batch=source.local_batch_size * mesh.dims.dp,
        num_batches=None if validation.steps == -1 else validation.steps,
    )
    log_batches(batches, seq_len=source.seq_len, freq=validation.freq)
    return Validator(
        loader=Loader(
            batches,
            local_batch_size=source.local_batch_size,
            accumulation=1,
            dp_rank=mesh.dp_rank,
            dp_degree=mesh.dims.dp,
            settings=validation.dataloader,
        ),
        execution=execution,
        shard=shard,
        model=model,
        mesh=mesh,
        device=device,
        data=describe_data(batches, source=source),
        freq=validation.freq,
        before_saves=config.checkpoint.enable and config.checkpoint.keep_best > 0,
        first_timeout_seconds=config.comm.init_timeout_seconds,
        timeout_seconds=config.comm.train_timeout_seconds,
        tells_perplexity=not is_import_path(config.training.loss),
    )


def log_batches(batches: PadToBatch, *, seq_len: int, freq: int) -> None:
    """Log on how much the run is validated, and when."""
    logger.info(
        "Validation on %s of %s in %s, every %s",
        amount(batches.num_drawn, "sample"),
        amount(seq_len, "token"),
        amount(batches.num_batches, "batch"),
        amount(freq, "step") if freq > 1 else "step",
    )


def describe_data(batches: PadToBatch, *, source: TrainingConfig) -> str:
    """Return what is another one wherever losses do not compare: other samples, fewer of them, or
    documents that attend and are labelled in another way."""
    parts = [
        batches.fingerprint,
        batches.num_drawn,
        # in the words of earlier versions, whose checkpoints are compared by this
        "within" if source.attn_mask_type == "block_causal" else "across",
        "restart" if source.reset_positions else "continue",
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def describe_source(config: Config) -> TrainingConfig:
    """Return [training] with the data of [validation] in the place of its own, read once."""
    training, validation = config.training, config.validation
    source = replace(
        training,
        local_batch_size=validation.local_batch_size or training.local_batch_size,
        seq_len=validation.seq_len or training.seq_len,
        num_epochs=1,
    )
    if validation.holdout_fraction is not None:
        return source
    return replace(
        source,
        dataset=validation.dataset or training.dataset,
        dataset_path=validation.dataset_path,
        dataset_weights=(),
        dataset_mixture={},
    )


def build_held_out(
    config: Config, *, source: TrainingConfig, tokenizer: Tokenizer, once: Once = alone
) -> MapSamples:
    """Build the samples of the validation."""
    split = config.validation.holdout_fraction
    return build_samples(
        source,
        tokenizer=tokenizer,
        tokenizer_path=config.model.tokenizer_path,
        seed=SEED,
        split=split,
        held_out=True,
        of_validation=("holdout_fraction", "seq_len") if split is not None else OWN_KEYS,
        sections=own_sections(config),
        once=once,
    )
