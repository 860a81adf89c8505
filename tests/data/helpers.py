"""What several data tests share: a job's data settings, a loader, and all its steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from torchtitan.config.settings import convert, keys
from torchtitan.data.dataset import Dataset
from torchtitan.data.documents import build_text
from torchtitan.data.loader import Loader
from torchtitan.data.sampler import SkippedSamples
from torchtitan.data.settings import DataLoaderConfig, TrainingConfig
from torchtitan.data.tokenizer import ByteTokenizer

SEQ_LEN = 16


def training(cache: Path, **settings: object) -> TrainingConfig:
    values = {"seq_len": SEQ_LEN, "dataset_cache": str(cache), **settings}
    known = keys(TrainingConfig)
    typed = {k: convert(v, known[k,].annotation) if (k,) in known else v for k, v in values.items()}
    return TrainingConfig(**typed)


def write_texts(folder: Path, texts: dict[str, str]) -> list[str]:
    """Write files; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())
    return [str(folder / name) for name in texts]


def dataset_of(tmp_path: Path, *, seed: int = 0, **settings: object) -> Dataset:
    """A byte-tokenised data set; without settings, of one text of 1,000 numbered words."""
    if "dataset" not in settings:
        settings["dataset"] = "files"
    if settings["dataset"] == "files" and "dataset_path" not in settings:
        text = " ".join(f"word{i}" for i in range(1000))
        settings["dataset_path"] = write_texts(tmp_path / "text", {"words.txt": text})
    job = training(tmp_path / "cache", **settings)
    return build_text(job, tokenizer=ByteTokenizer(), seed=seed)


def loader_of(
    dataset: Dataset,
    *,
    batch: int = 2,
    accumulation: int = 1,
    rank: int = 0,
    degree: int = 1,
    position: int = 0,
    skipped: SkippedSamples | None = None,
    **settings: object,
) -> Loader:
    loader = Loader(
        dataset,
        local_batch_size=batch,
        accumulation=accumulation,
        dp_rank=rank,
        dp_degree=degree,
        settings=DataLoaderConfig(**settings),  # type: ignore[arg-type]
        skipped=skipped,
    )
    if position:
        loader.load_state_dict({"position": position, "fingerprint": dataset.fingerprint})
    return loader


def rows(step: list[dict[str, torch.Tensor]]) -> list[tuple[int, ...]]:
    """Tokens and labels of each sample of a step."""
    return [
        tuple(torch.cat([tokens, labels]).tolist())
        for batch in step
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True)
    ]


def check_resume(make_stream: Callable[[], Any], *, num_samples: int = 8) -> None:
    """Check that a custom stream resumes at its next sample after each of the first ones."""
    expected = [*islice(make_stream(), num_samples)]
    stream = make_stream()
    for number, sample in enumerate(expected):
        if number:
            state = json.loads(json.dumps(stream.state_dict()))
            stream = make_stream()
            stream.load_state_dict(state)
        assert next(iter(stream)) == sample
