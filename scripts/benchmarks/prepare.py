"""Text to tokens on disk, beside Hugging Face's `datasets` and `tokenizers`.

    ours       python -m torchtitan prepare, by the tokenizer's tokenizer.json, and by the same
               vocabulary as a tiktoken file: a token store
    datasets   load_dataset("json") and a batched map that calls the same tokenizer.json; Arrow
               files

The text is JSON Lines: made-up words as frequent as Zipf's law has them, in documents of many
lengths, on which a byte-level BPE is trained first. Each way is a command of its own with the same
number of processes, and takes its turn; the numbers of tokens must be equal. Files are in the page
cache. On a busy machine compare processor seconds, of a command and what it starts. Memory is the
largest sum over the processes of a command, without mapped files (Linux).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.benchmarks.pairs import Comparison, DisagreementError, Report, check_close
from scripts.benchmarks.startup import processor_seconds
from torchtitan.base.errors import DataError
from torchtitan.data.store import TokenStore
from torchtitan.data.text import END_OF_TEXT
from torchtitan.tools.tokenizer import tokens_by_rank, train, write_tiktoken

SUMMARY = "text to tokens on disk, against datasets and tokenizers"
ROOT = Path(__file__).parents[2]
TARGET = "at most 1.00"
NUM_FILES, NUM_WORDS, MEDIAN_WORDS = 8, 50_000, 350
TRAINED_ON_BYTES = 4_000_000
SECONDS_BETWEEN_LOOKS = 0.1

PEER = """
import os, sys

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores
import datasets
import pyarrow.compute as pc
import tokenizers

num_proc, tokenizer, cache, *files = sys.argv[1:]
num_proc = int(num_proc)
tokenizer = tokenizers.Tokenizer.from_file(tokenizer)
end = tokenizer.token_to_id("<|endoftext|>")


def encode(rows):
    encoded = tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
    return {"input_ids": [each.ids + [end] for each in encoded]}


datasets.disable_progress_bars()
rows = datasets.load_dataset(
    "json", data_files=files, split="train", cache_dir=cache, num_proc=num_proc
)
ids = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))})
rows = rows.map(encode, batched=True, num_proc=num_proc, remove_columns=["text"], features=ids)
print(pc.sum(pc.list_value_length(rows.data.column("input_ids"))).as_py())
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--megabytes", type=float, default=100.0, metavar="N", help="text")
    parser.add_argument("--vocab_size", type=int, default=16384, metavar="N", help="trained ids")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes of each")


def measure(args: argparse.Namespace) -> Report:
    """Write the text, then let each way take its turn.

    Raises:
        UserError: `datasets` is not installed, a command fails, or numbers of tokens differ.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError("this compares with datasets: pip install -e '.[bench]'")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        files = _write_text(folder, num_bytes=int(args.megabytes * 1e6))
        by_json, by_ranks = _train_tokenizer(files[0], vocab_size=args.vocab_size)
        ours = {"tokenizer.json": by_json, "tiktoken file": by_ranks}
        turns: dict[str, list[_Turn]] = {name: [] for name in (*ours, "datasets")}
        for _ in range(args.pairs):
            for name, tokenizer in ours.items():
                turns[name].append(_ours(files, tokenizer, folder=folder, workers=args.workers))
            turns["datasets"].append(_peer(files, by_json, folder=folder, workers=args.workers))
        megabytes = sum(file.stat().st_size for file in files) / 1e6
    return _report(args, turns, megabytes=megabytes)


@dataclass(frozen=True)
class _Turn:
    seconds: float
    processor_seconds: float
    memory_gib: float
    num_tokens: int


def _report(args: argparse.Namespace, turns: dict[str, list[_Turn]], *, megabytes: float) -> Report:
    peer = turns["datasets"]
    memory = {name: max(turn.memory_gib for turn in found) for name, found in turns.items()}
    comparisons = []
    for name, found in turns.items():
        counts = [[float(turn.num_tokens) for turn in each] for each in (found, peer)]
        check_close(f"tokens by {name} and by datasets", *counts, tolerance=0.0)
        if found is peer:
            continue
        for what, clock in (("elapsed", "seconds"), ("processor", "processor_seconds")):
            ours, other = ([getattr(turn, clock) for turn in each] for each in (found, peer))
            title = f"{name} / datasets, {what}"
            comparisons.append(Comparison(title, TARGET, ours, other, 1000 * megabytes, "kB"))
    peaks = ", ".join(f"{name} {gib:.2f}" for name, gib in memory.items())
    return Report(
        about={"megabytes": round(megabytes, 1), "workers": args.workers}
        | {"vocab_size": args.vocab_size},
        comparisons=comparisons,
        notes=[
            f"each made the same {peer[0].num_tokens:,} tokens",
            f"peak memory of all processes, GiB: {peaks}",
        ],
        more={"memory_gib": memory, "num_tokens": peer[0].num_tokens},
    )


def _documents(num_bytes: int) -> Iterator[str]:
    """Yield documents of a log-normal number of words, the median one with MEDIAN_WORDS."""
    draw = np.random.default_rng(0)
    letters = [*"aaabcdeeeefghiiiklmnoooprrsstttuvwyz"]
    words = ["".join(draw.choice(letters, length)) for length in draw.integers(2, 12, NUM_WORDS)]
    words[::40] = [f"{word}." for word in words[::40]]  # ends of sentences, and numbers
    words[::90] = [str(number) for number in draw.integers(0, 3000, len(words[::90]))]
    spaced = np.array(words, dtype=object)
    while num_bytes > 0:
        length = int(draw.lognormal(np.log(MEDIAN_WORDS), 1.0)) + 1
        text = " ".join(spaced[draw.zipf(1.2, length) % NUM_WORDS])
        num_bytes -= len(text)
        yield text


def _write_text(folder: Path, *, num_bytes: int) -> list[Path]:
    paths = [folder / f"text_{number}.jsonl" for number in range(NUM_FILES)]
    documents = _documents(num_bytes)
    for path in paths:
        with path.open("w", encoding="utf-8") as file:
            left = num_bytes // NUM_FILES
            for text in documents:
                left -= file.write(json.dumps({"text": text}) + "\n")
                if left <= 0:
                    break
    return [path for path in paths if path.stat().st_size]


def _train_tokenizer(file: Path, *, vocab_size: int) -> tuple[Path, Path]:
    """Return one vocabulary as a tokenizer.json and as a tiktoken file."""
    with file.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines.readlines(TRAINED_ON_BYTES)]
    tokenizer = train(iter(texts), vocab_size=vocab_size)
    by_ranks, by_json = file.with_name("vocabulary.tiktoken"), file.with_name("tokenizer.json")
    write_tiktoken(by_ranks, tokens_by_rank(tokenizer))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(by_json))
    return by_json, by_ranks


def _ours(files: Sequence[Path], tokenizer: Path, *, folder: Path, workers: int) -> _Turn:
    store = folder / "ours" / "store"
    shutil.rmtree(store.parent, ignore_errors=True)
    script = str(ROOT / "scripts" / "prepare_data.py")
    options = ["--tokenizer", str(tokenizer), "--workers", str(workers)]
    _, seconds, processor, memory = _watch([script, str(store), *map(str, files), *options])
    return _Turn(seconds, processor, memory, TokenStore(store).num_tokens)


def _peer(files: Sequence[Path], tokenizer: Path, *, folder: Path, workers: int) -> _Turn:
    cache, script = folder / "peer", folder / "peer.py"
    shutil.rmtree(cache, ignore_errors=True)
    script.write_text(PEER, encoding="utf-8")
    command = [str(script), str(workers), str(tokenizer), str(cache), *map(str, files)]
    output, seconds, processor, memory = _watch(command)
    return _Turn(seconds, processor, memory, int(output.split()[-1]))


def _watch(command: Sequence[str]) -> tuple[str, float, float, float]:
    """Run a script; return its output, its seconds, elapsed and of processors, and GiB of memory
    at its largest."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    spent, began, peak = processor_seconds(), time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=errors, env=environ
        )
        while process.poll() is None:
            peak = max(peak, _memory_of_tree(process.pid))
            time.sleep(SECONDS_BETWEEN_LOOKS)
        seconds = time.perf_counter() - began
        output.seek(0), errors.seek(0)
        if process.returncode:
            raise DisagreementError(
                f"{Path(command[0]).name} failed, so there is nothing to compare:\n{errors.read()}"
            )
        return output.read(), seconds, processor_seconds() - spent, peak / 2**30


def _memory_of_tree(process: int) -> int:
    """Return the bytes of a process and all below it; what they share counts once, files not."""
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        tasks = [*Path(f"/proc/{process}/task").iterdir()]
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except (OSError, ValueError):  # it has ended, or this is no Linux
        return 0
    lines = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
    kib = sum(int(lines.get(name, "0 kB").split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    return kib * 1024 + sum(_memory_of_tree(child) for child in children)
