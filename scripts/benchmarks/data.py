"""Tokens per second of the data loader, beside numpy and Hugging Face's datasets.

    loader    as the trainer builds it, shuffled: a token store, and JSONL already tokenized;
              0 and 2 workers
    numpy     the limit: a loop that slices the same samples from the mapped tokens, in the same
              order and as int64, without checks or workers
    datasets  streams the same JSONL and tokenizes it meanwhile (if installed)

Every token must equal numpy's. The stream of `datasets` has another order, so there the number of
tokens of the complete file must be equal. All files are in the page cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.benchmarks.pairs import (
    ELAPSED,
    Comparison,
    DisagreementError,
    Report,
    Spent,
    alternate,
    check_close,
    timed,
)
from torchtitan.data.documents import build_text
from torchtitan.data.loader import Loader
from torchtitan.data.sampler import Permutation
from torchtitan.data.store import TokenStore, open_writer
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.job import load_config

WORKERS = (0, 2)
TOKENIZER = "byte"
DOCUMENT_BYTES = 2000
SKIPPED = "datasets is skipped: not installed (pip install -e '.[bench]')"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--seq_len", type=int, default=2048, metavar="N", help="tokens per sample")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="samples per batch")
    parser.add_argument("--batches", type=int, default=100, metavar="N", help="per measurement")
    parser.add_argument("--megabytes", type=float, default=8.0, metavar="N", help="size of text")


def measure(args: argparse.Namespace) -> Report:
    """Write the sources, and run the loader and its peers in turn.

    Raises:
        UserError: The text is too small for a sample, or tokens differ.
    """
    comparisons, notes = [], ["every token equals that of numpy"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _write_sources(folder, num_bytes=int(args.megabytes * 2**20))
        for source in ("store.bin", "text.jsonl"):
            for num_workers in WORKERS:
                loader = _build_loader(args, folder / source, num_workers=num_workers)
                comparisons += _compare(loader, args, folder, name=f"{source}, {num_workers}")
        if importlib.util.find_spec("datasets") is None:
            notes.append(SKIPPED)
        else:
            comparisons += _compare_stream(args, folder)
    names = ("seq_len", "batch", "batches", "megabytes")
    about = {name: getattr(args, name) for name in names} | {"torch": torch.__version__}
    return Report(about=about, comparisons=comparisons, notes=notes)


def _write_sources(folder: Path, *, num_bytes: int) -> None:
    """Write the same documents as a token store and as JSONL."""
    tokenizer = build_tokenizer(TOKENIZER)
    draw, words = random.Random(0), [f"word{i}" for i in range(1000)]
    with (
        (folder / "text.jsonl").open("w", encoding="utf-8") as file,
        open_writer(folder / "store", vocab_size=tokenizer.vocab_size) as writer,
    ):
        while num_bytes > 0:
            text = " ".join(draw.choices(words, k=DOCUMENT_BYTES // 8))
            num_bytes -= len(text)
            file.write(json.dumps({"text": text}) + "\n")
            ids = np.array([*tokenizer.encode(text), tokenizer.eos_id])
            writer.add(ids, ends_document=True)


def _build_loader(args: argparse.Namespace, source: Path, *, num_workers: int) -> Loader:
    """Build the loader of one rank; this tokenizes JSONL on first use."""
    options = [
        "--training.dataset=files",
        f"--training.dataset_path={source}",
        f"--training.dataset_cache={source.parent / 'cache'}",
        f"--training.seq_len={args.seq_len}",
        f"--training.local_batch_size={args.batch}",
        f"--training.dataloader.num_workers={num_workers}",
    ]
    settings = load_config(options).training
    return Loader(
        build_text(settings, tokenizer=build_tokenizer(TOKENIZER), seed=0),
        local_batch_size=args.batch,
        accumulation=1,
        dp_rank=0,
        dp_degree=1,
        settings=settings.dataloader,
    )


class _Limit:
    """Reads the same samples with numpy; their positions are computed before the clock runs."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._tokens = TokenStore(folder / "store").tokens
        self._args, self._next = args, args.batch  # after the loader's first batch

    def time(self) -> Spent:
        starts = self._find_starts()
        return timed(lambda: self._read(starts))

    def read(self) -> list[torch.Tensor]:
        """Return the tokens of the next batches."""
        return self._read(self._find_starts())

    def _find_starts(self) -> list[list[int]]:
        size, seq_len = self._args.batch, self._args.seq_len
        first, num_samples = self._next, (len(self._tokens) - 1) // seq_len
        self._next += size * self._args.batches
        starts = []
        for k in range(first, self._next):
            epoch, index = divmod(k, num_samples)
            starts.append(Permutation(num_samples, seed=0, epoch=epoch, source=0)[index] * seq_len)
        return [starts[i : i + size] for i in range(0, len(starts), size)]

    def _read(self, batches: list[list[int]]) -> list[torch.Tensor]:
        length = self._args.seq_len + 1
        found = []
        for starts in batches:
            rows = np.stack([self._tokens[start : start + length] for start in starts])
            found.append(torch.from_numpy(rows.astype(np.int64))[:, :-1])
        return found


def _compare(
    loader: Loader, args: argparse.Namespace, folder: Path, *, name: str
) -> list[Comparison]:
    """Compare with numpy."""
    name, limit = f"{name} workers / numpy", _Limit(args, folder)
    next(loader)  # starts the workers

    def read() -> list[torch.Tensor]:
        return [next(loader)[0]["tokens"] for _ in range(args.batches)]

    try:
        for tokens, expected in zip(read(), limit.read(), strict=True):
            if not torch.equal(tokens, expected):
                raise DisagreementError(f"{name}: tokens differ; no ratio is printed")
        return alternate(
            name,
            "no limit",
            lambda: timed(read),
            limit.time,
            num_pairs=args.pairs,
            clocks=[ELAPSED],  # workers are other processes
            amount=args.batch * args.batches * args.seq_len,
            unit="tokens",
        )
    finally:
        loader.close()


def _compare_stream(args: argparse.Namespace, folder: Path) -> list[Comparison]:
    """Compare with Hugging Face's stream of the JSONL."""
    import datasets

    loader = _build_loader(args, folder / "text.jsonl", num_workers=0)
    tokenizer = build_tokenizer(TOKENIZER)
    lines = datasets.load_dataset(
        "json", data_files=str(folder / "text.jsonl"), split="train", streaming=True
    )
    num_tokens = sum(len(ids) for ids in _tokenize(lines, tokenizer))
    store = TokenStore(folder / "store")
    check_close("tokens of all lines", [store.num_tokens], [num_tokens], tolerance=0.0)
    batches = _pack(lines, tokenizer, args=args)
    return alternate(
        "text.jsonl, 0 workers / datasets",
        "at most 1.00",
        lambda: timed(lambda: list(islice(loader, args.batches))),
        lambda: timed(lambda: list(islice(batches, args.batches))),
        num_pairs=args.pairs,
        clocks=[ELAPSED],
        amount=args.batch * args.batches * args.seq_len,
        unit="tokens",
    )


def _tokenize(lines: Any, tokenizer: Tokenizer) -> Iterator[list[int]]:
    for line in lines:
        yield [*tokenizer.encode(line["text"]), tokenizer.eos_id]


def _pack(lines: Any, tokenizer: Tokenizer, *, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield batches of concatenated documents, endlessly."""
    size, held = args.batch * args.seq_len, list[int]()
    while True:
        for ids in _tokenize(lines, tokenizer):
            held += ids
            while len(held) > size:
                yield torch.tensor(held[:size]).unflatten(0, (args.batch, args.seq_len))
                held = held[size:]
