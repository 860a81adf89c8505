"""Samples for supervised fine-tuning: one or more examples each, the loss only on the answers.

Examples are tokenised once, and it is planned once which of them share a sample. Both results are
token stores in the cache, mapped by all ranks and workers; the second holds numbers of examples in
the place of tokens. The order of samples is that of any `Dataset`, so a position is one number, and
a run resumes on the next sample in any layout.

A sample's tensors, labels included, are made each time the sample is read; there is no mask. An
example of n tokens takes n - 1 places, since its last token is only a label, and no label crosses
from one example to the next. The rest is filled with the end token, without labels; `length` is the
number of tokens before it.

Examples of different lengths put together into samples of equal length.

One example per sample would fill most of a batch with padding. Cutting examples to fill samples, as
with text, would separate answers from their questions. So whole examples are packed by best fit
decreasing: from the longest to the shortest, each into the sample where it leaves the least room.
This takes at most 11/9 of the fewest samples possible, plus a constant (Johnson, "Near-optimal bin
packing algorithms", 1973). Data for fine-tuning have many short examples, so little stays empty.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.base.errors import DataError
from torchtitan.base.log import plural
from torchtitan.data.corpus import Files
from torchtitan.data.dataset import IGNORED, Dataset, has_document_lengths
from torchtitan.data.files import Once, alone, find_all
from torchtitan.data.holdout import Holdout
from torchtitan.data.prepare import cached
from torchtitan.data.readers import check_heads
from torchtitan.data.sampler import Permutation
from torchtitan.data.store import StoreWriter, TokenStore
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.finetune.chat import ChatTemplate
from torchtitan.finetune.chat_files import find_template
from torchtitan.finetune.examples import Encoder, check_has_rows, read_examples
from torchtitan.finetune.shapes import Example
from torchtitan.finetune.synthetic import SyntheticExamples

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
            check_has_rows(file)
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
        self._has_lengths = has_document_lengths(training)
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
        sample = {"tokens": tokens, "labels": labels, "length": torch.tensor(begin)}
        if not self._has_lengths:
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
    holdout: Holdout | None = None,
    once: Once = alone,
) -> Dataset:
    """Build the samples of examples that `[training]` describes, tokenised unless that was done.

    `held_out`: of generated examples the part that is never trained on. `holdout`: of all examples
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
        name=source.name,
        cache=training.dataset_cache,
        vocab_size=2 * tokenizer.vocab_size,
        write=lambda writer: _encode(source, Encoder(tokenizer, template), writer=writer),
    )
    content = examples.content_hash()
    divided = holdout.fingerprint() if holdout else {}
    seq_len, packing, long_examples = training.seq_len, training.packing, training.long_examples
    samples, planned = cached(
        [FORMAT, ORDER, content, seq_len, seed, packing, long_examples, *divided.items()],
        name=f"the samples of {source.name}",
        cache=training.dataset_cache,
        vocab_size=examples.num_documents,
        write=lambda writer: _plan(examples, training, seed=seed, holdout=holdout, writer=writer),
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
            f"{plural(num_skipped, 'example')} without an assistant's words or a completion; if "
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
    holdout: Holdout | None,
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
        if holdout is not None and not holdout.selects(row):
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
    if holdout is not None and not ours:
        raise holdout.too_small(needed="one example", found=f"none of {examples.num_documents}")
    if not numbers:
        rule = (
            f"there must be an example with an answer in its first {seq_len} tokens, found "
            f"none in {plural(ours, 'example')}; raise seq_len"
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
        plural(found["num_examples"] - planned.get("other_side", 0), "example"),
        plural(planned["num_samples"], "sample"),
        plural(seq_len, "token"),
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
            plural(long, "example"),
            training.long_examples,
            plural(found["without_answer"], "example"),
            cut_off,
            plural(seq_len, "token"),
        )
    if found["without_end"]:
        logger.warning(
            "the chat template's {%% generation %%} marks leave out the token that ends the turn "
            "in %s: the model will not learn to end; move {%% endgeneration %%} behind it",
            plural(found["without_end"], "example"),
        )


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return groups of places in `lengths`, each of at most `capacity` together.

    Each place comes once. Equal lengths keep their order, so the groups depend only on the lengths.
    """
    assert all(0 < length <= capacity for length in lengths)
    groups: list[list[int]] = []
    # what is left in each group, and its number, sorted
    room: list[tuple[int, int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[place]
        best = bisect_left(room, (length, 0))
        if best == len(room):
            left, group = capacity, len(groups)
            groups.append([])
        else:
            left, group = room.pop(best)
        groups[group].append(place)
        if left > length:
            insort(room, (left - length, group))
    return groups


def pack(lengths: Sequence[int], *, capacity: int, window: int) -> Iterator[list[int]]:
    """Yield the groups of the first `window` lengths, then those of the next, and so on.

    Examples stay near their neighbours, and a search is over at most a window.
    """
    for first in range(0, len(lengths), window):
        for group in best_fit(lengths[first : first + window], capacity=capacity):
            yield [first + place for place in group]
