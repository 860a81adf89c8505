"""How fast the loader hands out tokens, beside the limit.

    ours    the loader as the trainer builds it, in its shuffled order: a token store, JSONL (which
            its first use tokenises, before the clock runs) and a mix of both; 0 and 2 workers
    numpy   the limit: a loop over the same Megatron index, one slice of the mapped tokens a sample
            into the same int64 arrays, in the same order, no checks, no worker
    datasets   Hugging Face's, streaming the same JSONL and tokenising it as it goes (if installed)

Of numpy the tokens must be equal, one by one. Hugging Face's stream has an order of its own, so
there the number of tokens of the whole file must be equal. All files are in the page cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.benchmarks.pairs import (
    Comparison,
    DisagreementError,
    Report,
    alternate,
    check_close,
    timed,
)
from torchtitan.data.dataset import Dataset, build_dataset
from torchtitan.data.loader import Loader
from torchtitan.data.sampler import Mixture, Permutation
from torchtitan.data.store import TokenStore
from torchtitan.data.store_writer import open_writer
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.job import load_config

SUMMARY = "tokens a second through the loader, against plain numpy"
WORKERS = (0, 2)
TOKENIZER = "byte"
DOCUMENT_BYTES = 2000
LIMIT = "no limit is set"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--seq_len", type=int, default=2048, metavar="N", help="of a sample")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="samples at once")
    parser.add_argument("--batches", type=int, default=100, metavar="N", help="in a measurement")
    parser.add_argument(
        "--megabytes", type=float, default=8.0, metavar="N", help="text of a source"
    )


def measure(args: argparse.Namespace) -> Report:
    """Write the sources, then let each loader and its peer take turns.

    Raises:
        UserError: The sources are too small for a sample, or tokens differ.
    """
    amount = args.batch * args.batches * args.seq_len
    comparisons = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        sources = _write_sources(folder, num_bytes=int(args.megabytes * 2**20))
        for name, paths in sources.items():
            job = _Job(name, paths, args, folder)
            for num_workers in WORKERS:
                comparisons.append(_compare(job, num_workers=num_workers, amount=amount))
        streamed, note = _stream(folder, args)
        comparisons += streamed
    about = {"seq_len": args.seq_len, "batch": args.batch, "batches": args.batches}
    return Report(
        about=about | {"megabytes": args.megabytes, "torch": torch.__version__},
        comparisons=comparisons,
        notes=["every token of ours is equal to that of numpy", note],
    )


def _documents(num_bytes: int) -> Iterator[str]:
    draw, words = random.Random(0), [f"word{i}" for i in range(1000)]
    while num_bytes > 0:
        text = " ".join(draw.choices(words, k=DOCUMENT_BYTES // 8))
        num_bytes -= len(text)
        yield text


def _write_sources(folder: Path, *, num_bytes: int) -> dict[str, list[Path]]:
    """Write the same documents as a token store and as JSONL."""
    tokenizer = build_tokenizer(TOKENIZER)
    store, lines = folder / "store", folder / "text.jsonl"
    with (
        lines.open("w", encoding="utf-8") as file,
        open_writer(store, vocab_size=tokenizer.vocab_size) as writer,
    ):
        for text in _documents(num_bytes):
            file.write(json.dumps({"text": text}) + "\n")
            ids = np.array([*tokenizer.encode(text), tokenizer.eos_id])
            writer.add(ids, ends_document=True)
    tokens = store.with_suffix(".bin")
    return {"store": [tokens], "JSONL": [lines], "mix": [tokens, lines]}


@dataclass(frozen=True)
class _Job:
    """One source as the settings of a job."""

    name: str
    paths: list[Path]
    args: argparse.Namespace
    folder: Path

    def settings(self, *, num_workers: int) -> Any:
        """Return the `[training]` section."""
        given = ["--training.dataset_path", *map(str, self.paths)]
        if len(self.paths) > 1:
            given += ["--training.dataset_weights", *("1" for _ in self.paths)]
        options = [
            "--training.dataset=files",
            f"--training.dataset_cache={self.folder / 'cache'}",
            f"--training.seq_len={self.args.seq_len}",
            f"--training.local_batch_size={self.args.batch}",
            f"--training.dataloader.num_workers={num_workers}",
        ]
        return load_config([*given, *options]).training

    def dataset(self) -> Dataset:
        """Build the samples, tokenised by now or at once."""
        tokenizer = build_tokenizer(TOKENIZER)
        return build_dataset(self.settings(num_workers=0), tokenizer=tokenizer, seed=0)

    def loader(self, *, num_workers: int) -> Loader:
        """Build the loader as one rank of a job has it."""
        return Loader(
            self.dataset(),
            local_batch_size=self.args.batch,
            accumulation=1,
            dp_rank=0,
            dp_degree=1,
            settings=self.settings(num_workers=num_workers).dataloader,
        )


class _Ours:
    def __init__(self, loader: Loader, *, num_batches: int) -> None:
        self.loader, self._num_batches = loader, num_batches
        next(self.loader)  # workers are up

    def time(self) -> float:
        return timed(self.read)

    def read(self) -> list[torch.Tensor]:
        """Return the tokens of the next batches."""
        return [next(self.loader)[0]["tokens"] for _ in range(self._num_batches)]


class _Limit:
    """Reads the same samples by numpy alone; their places are looked up before the clock runs."""

    def __init__(self, job: _Job) -> None:
        self._tokens = TokenStore(job.folder / "store").tokens
        self._seq_len, self._batch = job.args.seq_len, job.args.batch
        self._num_batches = job.args.batches
        self._mixture = Mixture([1.0] * len(job.paths))
        self._next = self._batch  # after the first one, which ours has drawn already

    def time(self) -> float:
        starts = self._places()
        return timed(lambda: self._read(starts))

    def read(self) -> list[torch.Tensor]:
        """Return the tokens of the next batches."""
        return self._read(self._places())

    def _places(self) -> list[list[int]]:
        # all sources hold the same documents
        first, num_samples = self._next, (len(self._tokens) - 1) // self._seq_len
        self._next += self._batch * self._num_batches
        starts = []
        for k in range(first, self._next):
            draw = self._mixture[k]
            epoch, index = divmod(draw.index, num_samples)
            order = Permutation(num_samples, seed=0, epoch=epoch, source=draw.source)
            starts.append(order[index] * self._seq_len)
        return [starts[i : i + self._batch] for i in range(0, len(starts), self._batch)]

    def _read(self, batches: list[list[int]]) -> list[torch.Tensor]:
        length = self._seq_len + 1
        found = []
        for starts in batches:
            rows = np.stack([self._tokens[start : start + length] for start in starts])
            found.append(torch.from_numpy(rows.astype(np.int64))[:, :-1])
        return found


def _compare(job: _Job, *, num_workers: int, amount: int) -> Comparison:
    name = f"{job.name}, {num_workers} workers / numpy"
    ours = _Ours(job.loader(num_workers=num_workers), num_batches=job.args.batches)
    limit = _Limit(job)
    for mine, others in zip(ours.read(), limit.read(), strict=True):
        if not torch.equal(mine, others):
            raise DisagreementError(f"{name}: the tokens read are not equal; no ratio is given")
    try:
        return alternate(
            name,
            LIMIT,
            ours.time,
            limit.time,
            num_pairs=job.args.pairs,
            amount=amount,
            unit="tokens",
        )
    finally:
        ours.loader.close()


def _stream(folder: Path, args: argparse.Namespace) -> tuple[list[Comparison], str]:
    """Compare with Hugging Face's stream of the same lines, or say why not."""
    if importlib.util.find_spec("datasets") is None:
        return [], "datasets is left out: it is not installed (pip install -e '.[bench]')"
    import datasets

    job = _Job("JSONL", [folder / "text.jsonl"], args, folder)
    ours = _Ours(job.loader(num_workers=0), num_batches=args.batches)
    tokenizer = build_tokenizer(TOKENIZER)
    lines = datasets.load_dataset(
        "json", data_files=str(job.paths[0]), split="train", streaming=True
    )
    num_tokens = sum(len(ids) for ids in _tokenized(lines, tokenizer))
    store = TokenStore(folder / "store")
    check_close("tokens of all lines", [store.num_tokens], [num_tokens], tolerance=0.0)
    batches = _packed(lines, tokenizer, args=args)
    comparison = alternate(
        "JSONL, 0 workers / datasets",
        "at most 1.00",
        ours.time,
        lambda: timed(lambda: list(islice(batches, args.batches))),
        num_pairs=args.pairs,
        amount=args.batch * args.batches * args.seq_len,
        unit="tokens",
    )
    return [comparison], "datasets tokenises as it streams, ours has done so in its first pass"


def _tokenized(lines: Any, tokenizer: Tokenizer) -> Iterator[list[int]]:
    for line in lines:
        yield [*tokenizer.encode(line["text"]), tokenizer.eos_id]


def _packed(
    lines: Any, tokenizer: Tokenizer, *, args: argparse.Namespace
) -> Iterator[torch.Tensor]:
    """Yield batches of the stream for ever, documents one behind the other."""
    size, held = args.batch * args.seq_len, list[int]()
    while True:
        for ids in _tokenized(lines, tokenizer):
            held += ids
            while len(held) > size:
                yield torch.tensor(held[:size]).unflatten(0, (args.batch, args.seq_len))
                held = held[size:]
