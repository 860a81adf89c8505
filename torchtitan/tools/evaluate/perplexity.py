"""Perplexity of held-out text: the loss per token, as in training and validation.

The documents of a domain are joined, each with an end token, and cut into sequences of `seq_len` as
for training; an incomplete last sequence is dropped. The loss is the sum over all labels divided by
their number, so it equals the validation loss that the trainer logs for these files.

Bits per byte compare models with different tokenizers: (tokens / bytes) x loss / ln 2 of the text
(arXiv:2101.00027), including end tokens, since they are predicted too.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import track

from torchtitan.base.errors import DataError, UserError
from torchtitan.data.dataset import Dataset, PadToBatch
from torchtitan.data.documents import build_text
from torchtitan.data.loader import Loader
from torchtitan.data.prepare import read_notes
from torchtitan.data.settings import DataLoaderConfig, TrainingConfig
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.models.interface import LanguageModel
from torchtitan.optim.loss import count_valid
from torchtitan.parallel.context.shard import SequenceShard
from torchtitan.parallel.execution import WholeModel
from torchtitan.validate import perplexity_of

T = TypeVar("T")


def open_domain(
    name: str,
    files: tuple[str, ...],
    *,
    cut: TrainingConfig,
    tokenizer: Tokenizer,
    of: str = "--perplexity",
) -> Dataset:
    """Tokenize the text of a domain, unless it is in the cache, and cut it into sequences.

    `cut` is how the text is cut; `of` the setting that names the files, for messages. Raises
    DataError if files are missing, empty, damaged or hold less than a sequence.
    """
    source = replace(cut, dataset="files", dataset_path=files, num_epochs=1)
    try:
        # the seed only changes the order
        return build_text(source, tokenizer=tokenizer, seed=0)
    except DataError as error:
        raise error.within(f"{of} {name}") from error


@torch.no_grad()
def measure(
    model: LanguageModel,
    name: str,
    samples: Dataset,
    *,
    cut: TrainingConfig,
    tokenizer: Tokenizer,
    batch_size: int,
) -> dict[str, float]:
    """Measure a model on a domain. All ranks that share the model must call this.

    Returns:
        `loss` in nats per token, `perplexity` and `bits_per_byte`; counts of predicted tokens, of
        all tokens with an end token after each document, of documents, and of bytes in UTF-8.

    Raises UserError if the loss is not finite, or no token of the text has a label.
    """
    mask, resets = cut.attn_mask_type, cut.reset_positions
    shard = SequenceShard(None, rank=0, attn_mask_type=mask, reset_positions=resets)
    execution, device = WholeModel(model), next(model.parameters()).device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_labels = torch.zeros((), dtype=torch.int64)
    batches = PadToBatch(samples, batch=batch_size)
    loader = Loader(
        batches,
        local_batch_size=batch_size,
        accumulation=1,
        dp_rank=0,
        dp_degree=1,
        settings=DataLoaderConfig(),
    )
    for [drawn] in tracked(loader, name, total=batches.num_batches):
        batch = shard.take(drawn)
        num_labels += count_valid(batch.labels)
        loss_sum += execution.evaluate(batch.to(device))
    if not num_labels:
        raise DataError(f"--perplexity {name}: no document has a second token to predict")
    loss = loss_sum.item() / num_labels.item()
    if not math.isfinite(loss):
        raise UserError(
            f"--perplexity {name}: the loss must be finite, got {loss}; try "
            f"--dtype float32, or another checkpoint"
        )
    num_bytes = sum(_num_bytes(store, tokenizer) for store in samples.stores)
    return {
        "loss": loss,
        "perplexity": perplexity_of(loss),
        "bits_per_byte": loss / math.log(2) * samples.num_tokens / num_bytes,
        "num_tokens": int(num_labels),
        "num_tokens_of_text": samples.num_tokens,
        "num_documents": sum(store.num_documents for store in samples.stores),
        "num_bytes": num_bytes,
    }


def _num_bytes(store: TokenStore, tokenizer: Tokenizer) -> int:
    """Return the size of a store's text: as recorded in the cache, or of the decoded tokens."""
    folder = Path(store.prefix).parent
    if (folder / "about.json").is_file() and (num_bytes := read_notes(folder).get("text_bytes")):
        return int(num_bytes)
    documents = (store.document(number).tolist() for number in range(store.num_documents))
    texts = (tokenizer.decode([i for i in ids if i != tokenizer.eos_id]) for ids in documents)
    return sum(len(text.encode()) for text in texts)


def tracked(items: Iterable[T], noun: str, *, total: int) -> Iterable[T]:
    """Yield the items, on rank 0 with a progress bar in a terminal."""
    is_shown = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    console = Console(stderr=True)
    return track(items, noun, total=total, console=console, transient=True, disable=not is_shown)
