"""Rules of validation: what it reads, and that it fits the layout of the training."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.config.broken import Broken
from torchtitan.config.data_rules import worker_rules
from torchtitan.config.layout_rules import SEQUENCE_TIES, misfit
from torchtitan.job import Config

READS = ("files", "examples")


def validation_rules(config: Config) -> Iterator[Broken]:
    """Check the data and the batch, where there is validation; a split holds out without it too."""
    validation = config.validation
    if validation.split is not None:
        if validation.dataset or validation.dataset_path:
            yield Broken(
                ("validation.split", "validation.dataset", "validation.dataset_path"),
                "holds out documents of the training's data, and cannot be given together with "
                "dataset or dataset_path; remove either",
            )
    elif validation.enable:
        yield from _data(config)
    if validation.enable:
        yield from _batch(config)
        yield from worker_rules(config.validation.dataloader, section="validation.dataloader")
    if config.checkpoint.keep_best and not config.validation.enable:
        yield Broken(
            ("checkpoint.keep_best", "validation.enable"),
            "keeps the checkpoints of lowest validation loss and needs validation.enable = true, "
            f"got keep_best = {config.checkpoint.keep_best}",
        )
    elif config.checkpoint.keep_best and not config.checkpoint.enable:
        yield Broken(
            ("checkpoint.keep_best", "checkpoint.enable"), "needs checkpoint.enable = true"
        )


def _data(config: Config) -> Iterator[Broken]:
    validation, training = config.validation, config.training
    kind = validation.dataset or training.dataset
    keys = ("validation.dataset", "validation.dataset_path", "validation.enable")
    ties = (*keys, "training.dataset")
    if kind == training.dataset == "python_stdlib":
        yield Broken(
            ties,
            'needs data of its own: training reads all of "python_stdlib"; hold out a part of it '
            'with validation.split = 0.05 and no dataset, or write "files" with dataset_path',
        )
    elif kind in READS and not validation.dataset_path:
        yield Broken(
            ties,
            f'"{kind}" needs validation.dataset_path, the files to read; or hold out a part of the '
            "training's documents with validation.split = 0.05 and no dataset",
        )
    elif kind not in READS and validation.dataset_path:
        yield Broken(
            (keys[1], keys[0], "training.dataset"),
            f'is read only with dataset = "files" or "examples", got "{kind}"; change or remove',
        )


def _batch(config: Config) -> Iterator[Broken]:
    validation, parallelism = config.validation, config.parallelism
    if validation.steps != -1 and validation.steps < 1:
        yield Broken(
            ("validation.steps",),
            f"must be -1 (all samples, each once) or at least 1, got {validation.steps}",
        )
    if validation.seq_len is not None and (
        rule := misfit(validation.seq_len, parallelism=parallelism)
    ):
        yield Broken(("validation.seq_len", *SEQUENCE_TIES), rule)
    size = validation.local_batch_size
    if size is None or parallelism.pipeline_parallel_degree == 1:
        return
    whole, number = config.training.local_batch_size, parallelism.pipeline_parallel_num_microbatches
    microbatch = parallelism.pipeline_parallel_microbatch_size
    microbatch = microbatch if number is None else max(1, whole // number)
    if size % microbatch:
        yield Broken(
            (
                "validation.local_batch_size",
                "parallelism.pipeline_parallel_degree",
                "parallelism.pipeline_parallel_microbatch_size",
                "parallelism.pipeline_parallel_num_microbatches",
            ),
            f"must be a multiple of the {microbatch} samples of a pipeline's microbatch, got "
            f"{size}; try {max(size // microbatch, 1) * microbatch}",
        )
