"""Rules of the samples: where they come from, and how many make a step."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.config.broken import Broken
from torchtitan.data.settings import DataLoaderConfig
from torchtitan.job import Config


def data_rules(config: Config) -> Iterator[Broken]:
    """Check the data, the batch, and the workers that read."""
    yield from _data(config)
    yield from _examples(config)
    yield from _batch(config)
    yield from worker_rules(config.training.dataloader, section="training.dataloader")


def _data(config: Config) -> Iterator[Broken]:
    training = config.training
    num_paths, num_weights = len(training.dataset_path), len(training.dataset_weights)
    keys = ("training.dataset_path", "training.dataset")
    reads = ("files", "examples")
    if training.dataset in reads and not num_paths:
        yield Broken(keys[::-1], "needs dataset_path, the files to read")
    if training.dataset not in reads and num_paths:
        yield Broken(
            keys,
            'is read only with dataset = "files" or "examples", '
            f'got "{training.dataset}"; change or remove',
        )
    if num_weights and training.dataset == "examples":
        yield Broken(
            ("training.dataset_weights", keys[1]),
            'is for dataset = "files"; examples are one source, in which each comes once an epoch',
        )
    elif num_weights and num_weights != num_paths:
        yield Broken(
            ("training.dataset_weights", keys[0]),
            f"must hold one weight for each dataset_path, got {num_weights} for {num_paths}",
        )


def _examples(config: Config) -> Iterator[Broken]:
    training = config.training
    given = {
        "chat_template": training.chat_template is not None,
        "packing": training.packing != "padded",
        "long_examples": training.long_examples != "truncate",
    }
    if training.dataset not in ("examples", "synthetic_examples"):
        for key in (key for key, differs in given.items() if differs):
            yield Broken(
                (f"training.{key}", "training.dataset"),
                'is read only with dataset = "examples" or "synthetic_examples", got '
                f'"{training.dataset}"; change or remove',
            )
    elif training.packing == "packed" and training.document_attention != "within":
        yield Broken(
            ("training.packing", "training.document_attention"),
            'needs document_attention = "within", which keeps the examples of a sample apart',
        )


def _batch(config: Config) -> Iterator[Broken]:
    whole, local = config.training.global_batch_size, config.training.local_batch_size
    if whole != -1 and (whole < 1 or whole % local):
        yield Broken(
            ("training.global_batch_size", "training.local_batch_size"),
            f"must be -1 or a positive multiple of local_batch_size ({local}), got {whole}; "
            f"try {max(whole // local, 1) * local}",
        )


def worker_rules(loader: DataLoaderConfig, *, section: str) -> Iterator[Broken]:
    """Check that what shapes worker processes has some to shape."""
    if loader.num_workers == 0:
        rule = "needs worker processes, got num_workers = 0; raise num_workers or remove this"
        if loader.persistent_workers:
            yield Broken((f"{section}.persistent_workers", f"{section}.num_workers"), rule)
        if loader.prefetch_factor is not None:
            yield Broken((f"{section}.prefetch_factor", f"{section}.num_workers"), rule)
