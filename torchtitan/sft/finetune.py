"""Samples for supervised fine-tuning: one or more examples each, the loss only on the answers.

Examples are tokenised once, and it is planned once which of them share a sample. Both results are
token stores in the cache, mapped by all ranks and workers; the second holds numbers of examples in
the place of tokens. The order of samples is that of any `Dataset`, so a position is one number, and
a run resumes on the next sample in any layout.

A sample's tensors, labels included, are made each time the sample is read; no mask is stored. An
example of n tokens takes n - 1 places, since its last token is only a label, and no label crosses
from one example to the next. The rest is filled with the end token, without labels.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.data.dataset import IGNORED, Dataset, tells_documents
from torchtitan.data.files import Once, alone, find_all
from torchtitan.data.prepare import cached
from torchtitan.data.sampler import Permutation
from torchtitan.data.source import Files, check_heads
from torchtitan.data.split import Side
from torchtitan.data.store import StoreWriter, TokenStore
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.sft.chat import ChatTemplate
from torchtitan.sft.chat_files import find_template
from torchtitan.sft.examples import Encoder, check_is_rows, read_examples
from torchtitan.sft.packing import pack
from torchtitan.sft.shapes import Example
from torchtitan.sft.synthetic import SyntheticExamples

if TYPE_CHECKING:
    from torchtitan.data.loader import Samples
    from torchtitan.data.settings import TrainingConfig

logger = logging.getLogger(__name__)

# part of the fingerprints: raise them when the same examples would become other numbers or samples
FORMAT, ORDER = "examples 2", "1"
WINDOW = 1 << 14
EXAMPLES_AT_ONCE = 64


class FileExamples(Files):
    """The examples of files of rows."""

    def examples(self) -> Iterator[Example]:
        """Check names and contents of all files, then yield the examples of each."""
        for file in self.files:
            check_is_rows(file)
        check_heads(self.files)
        for file in self.files:
            yield from read_examples(file)


class ExampleSource:
    """Samples of one or more examples each.

    Each example counts as a document in `document_lengths`, and so does the padding.

    Args:
        examples: numbers of the `Encoder`, a document per example.
        samples: numbers of examples, a document per sample.
        pad_id: the token that fills the rest of a sample.
    """

    def __init__(
        self, examples: TokenStore, samples: TokenStore, training: TrainingConfig, *, pad_id: int
    ) -> None:
        self.stores: Sequence[TokenStore] = [examples]
        self.samples, self._seq_len, self._pad_id = samples, training.seq_len, pad_id
        self._tells_documents = tells_documents(training)
        self.num_samples = samples.num_documents

    def __getitem__(self, i: int) -> Samples:
        [examples] = self.stores
        tokens = torch.full((self._seq_len,), self._pad_id)
        labels = torch.full((self._seq_len,), IGNORED)
        lengths: list[int] = []
        begin = 0
        for number in self.samples.document(i):
            row = examples.document(number)[: self._seq_len + 1]
            row = torch.from_numpy(row.astype(np.int64))
            ids, due = row >> 1, (row & 1).bool()
            end = begin + len(row) - 1
            tokens[begin:end] = ids[:-1]
            labels[begin:end] = torch.where(due[1:], ids[1:], IGNORED)
            lengths.append(end - begin)
            begin = end
        is_padding = torch.arange(self._seq_len) >= begin
        sample = {"tokens": tokens, "labels": labels, "is_padding": is_padding}
        if not self._tells_documents:
            return sample
        if begin < self._seq_len:
            lengths.append(self._seq_len - begin)
        return sample | {"document_lengths": torch.tensor(lengths)}


def build_examples(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    seed: int,
    held_out: bool = False,
    side: Side | None = None,
    once: Once = alone,
) -> Dataset:
    """Build the samples of examples that `[training]` describes, tokenised unless that was done.

    `held_out`: of generated examples the part that is never trained on. `side`: of all examples
    those that are held out by their hash, or the others. `once`: what looks for files. Raises
    DataError if examples or template are missing or wrong, or no example is usable.
    """
    template = find_template(
        training.chat_template, tokenizer=tokenizer, tokenizer_path=tokenizer_path
    )
    source = find_examples(training, held_out=held_out, once=once)
    template_hash = _hash(template)
    examples, found = cached(
        [FORMAT, tokenizer.fingerprint, template_hash, source.name, once(source.identity)],
        what=source.name,
        cache=training.dataset_cache,
        vocab_size=2 * tokenizer.vocab_size,
        write=lambda writer: _encode(source, Encoder(tokenizer, template), writer=writer),
    )
    content = examples.content_hash()
    divided = side.fingerprint() if side else {}
    seq_len, packing, long_examples = training.seq_len, training.packing, training.long_examples
    samples, planned = cached(
        [FORMAT, ORDER, content, seq_len, seed, packing, long_examples, *divided.items()],
        what=f"the samples of {source.name}",
        cache=training.dataset_cache,
        vocab_size=examples.num_documents,
        write=lambda writer: _plan(examples, training, seed=seed, side=side, writer=writer),
    )
    _report(found, planned, training)
    return Dataset(
        [ExampleSource(examples, samples, training, pad_id=tokenizer.eos_id)],
        seed=seed,
        num_epochs=training.num_epochs,
        fingerprint={
            "data": content,
            "tokenizer": tokenizer.fingerprint,
            "chat template": template_hash,
            "packing": packing,
            "long examples": long_examples,
            "order": f"{ORDER} of examples",
            **divided,
            "seq_len": str(seq_len),
            "seed": str(seed),
        },
    )


def find_examples(
    training: TrainingConfig, *, held_out: bool = False, once: Once = alone
) -> FileExamples | SyntheticExamples:
    """Return the examples that `[training]` names, unread."""
    if training.dataset != "examples":
        return SyntheticExamples(held_out=held_out)
    named = find_all(training.paths, cache=training.dataset_cache, once=once)
    return FileExamples(tuple(file for files in named for file in files))


def encode_all(
    source: FileExamples | SyntheticExamples, encoder: Encoder
) -> Iterator[tuple[Example, npt.NDArray[np.int64] | None]]:
    """Yield each example with its numbers, None where there is nothing to learn in it."""
    examples = source.examples()
    while batch := [*islice(examples, EXAMPLES_AT_ONCE)]:
        yield from zip(batch, encoder.encode(batch), strict=True)


def _hash(template: ChatTemplate | None) -> str:
    if template is None:
        return "none"
    parts = [template.source, sorted(template.variables.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _encode(
    source: FileExamples | SyntheticExamples, encoder: Encoder, *, writer: StoreWriter
) -> dict[str, Any]:
    """Write the numbers of all examples in which there is something to learn."""
    num_skipped = 0
    for _, row in encode_all(source, encoder):
        if row is None:
            num_skipped += 1
        else:
            writer.add(row, ends_document=True)
    if not writer.num_documents and not num_skipped:
        raise DataError(f"data must hold examples, {source.name} has only blank lines; add some")
    if not writer.num_documents:
        raise DataError(
            f"there must be an example with an answer to learn, {source.name} has "
            f"{amount(num_skipped, 'example')} without an assistant's words or a completion; if "
            f"they have some, check what the chat template marks by {{% generation %}}"
        )
    return {
        "source": source.name,
        "num_examples": writer.num_documents + num_skipped,
        "without_answer": num_skipped,
        "without_end": encoder.num_without_end,
    }


def _plan(
    examples: TokenStore,
    training: TrainingConfig,
    *,
    seed: int,
    side: Side | None,
    writer: StoreWriter,
) -> dict[str, Any]:
    """Write the numbers of the examples of each sample."""
    seq_len = training.seq_len
    # shuffled, as neighbours in a file are alike; source 0 is the order of the samples
    order = Permutation(examples.num_documents, seed=seed, epoch=0, source=1)
    counts: Counter[str] = Counter()
    numbers: list[int] = []
    lengths: list[int] = []
    for number in (order[i] for i in range(examples.num_documents)):
        row = examples.document(number)
        if side is not None and not side.has(row):
            counts["other_side"] += 1
            continue
        if len(row) > seq_len + 1:
            counts["too_long"] += 1
            if training.long_examples == "skip":
                continue
            row = row[: seq_len + 1]
        if not (num_due := int((row[1:] & 1).sum())):
            counts["answer_cut_off"] += 1
            continue
        counts["num_labels"] += num_due
        numbers.append(number)
        lengths.append(len(row) - 1)
    ours = examples.num_documents - counts["other_side"]
    if side is not None and not ours:
        raise side.refuse(needed="one example", found=f"none of {examples.num_documents}")
    if not numbers:
        rule = (
            f"there must be an example with an answer in its first {seq_len} tokens, found "
            f"none in {amount(ours, 'example')}; raise seq_len"
        )
        raise DataError.at("seq_len", rule)
    groups: Iterable[list[int]] = ([place] for place in range(len(lengths)))
    if training.packing == "packed":
        groups = pack(lengths, capacity=seq_len, window=WINDOW)
    for group in groups:
        writer.add(np.array([numbers[place] for place in group]), ends_document=True)
    return {
        "num_used": len(numbers),
        "num_places": sum(lengths),
        "num_samples": writer.num_documents,
        **counts,
    }


def _report(found: Mapping[str, Any], planned: Mapping[str, Any], training: TrainingConfig) -> None:
    """Log what became of the examples."""
    seq_len = training.seq_len
    capacity = planned["num_samples"] * seq_len
    logger.info(
        "%s: %d of %s in %s of %s, %.1f %% padding, loss on %.1f %%",
        found["source"],
        planned["num_used"],
        amount(found["num_examples"] - planned.get("other_side", 0), "example"),
        amount(planned["num_samples"], "sample"),
        amount(seq_len, "token"),
        100 - 100 * planned["num_places"] / capacity,
        100 * planned["num_labels"] / capacity,
    )
    long, cut_off = planned.get("too_long", 0), planned.get("answer_cut_off", 0)
    if long or cut_off or found["without_answer"]:
        logger.warning(
            "%s: longer than seq_len = %d: %s (long_examples: %s); left out: %s without "
            "an answer, and %d without one in the first %s",
            found["source"],
            seq_len,
            amount(long, "example"),
            training.long_examples,
            amount(found["without_answer"], "example"),
            cut_off,
            amount(seq_len, "token"),
        )
    if found["without_end"]:
        logger.warning(
            "the chat template's {%% generation %%} marks leave out the token that ends the turn "
            "in %s: the model will not learn to end; move {%% endgeneration %%} behind it",
            amount(found["without_end"], "example"),
        )
