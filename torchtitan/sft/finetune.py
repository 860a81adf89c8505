"""Samples for supervised fine-tuning: examples put into sequences, the loss only on the answers.

Examples are tokenised once and planned once: which of them share a sample. Both lie in the cache as
token stores, the second one with the numbers of examples in the place of tokens, mapped by all
ranks and workers. As with text, `dataset[k]` is the k-th sample of the run whoever asks, so that
one number is the position, and a run resumes on the next sample in any layout.

A sample's tensors are made anew each time it is asked for, labels with them: there is no mask that
could be kept, changed, and be wrong. An example of n tokens takes n - 1 places, since its last
token is only a label; no label crosses from one example to the next. What is left is filled with
the end token, which is harmless: its places have no labels, whatever token stands there.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.data.dataset import IGNORED, Dataset, tells_documents
from torchtitan.data.files import find_files
from torchtitan.data.prepare import cached
from torchtitan.data.sampler import Permutation
from torchtitan.data.source import check_heads, file_identity
from torchtitan.data.split import Side
from torchtitan.data.store import StoreWriter, TokenStore
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.sft.chat import ChatTemplate
from torchtitan.sft.chat_files import find_template
from torchtitan.sft.examples import Encoder, Example, check_is_lines, read_examples
from torchtitan.sft.packing import pack
from torchtitan.sft.synthetic import SyntheticExamples

if TYPE_CHECKING:
    from torchtitan.data.loader import Samples
    from torchtitan.data.settings import TrainingConfig

logger = logging.getLogger(__name__)

# part of the fingerprints: raise them when the same examples would become other numbers or samples
FORMAT, ORDER = "examples 2", "1"
WINDOW = 1 << 14
EXAMPLES_AT_ONCE = 64


class FileExamples:
    """The examples of JSON Lines files, in the order given."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.name = str(files[0]) if len(files) == 1 else f"{len(files)} files"

    def identity(self) -> list[str]:
        """Return path, size and times of each file."""
        return [*map(file_identity, self._files)]

    def examples(self) -> Iterator[Example]:
        """Yield the examples of each file, once it is known that none is binary."""
        for file in self._files:
            check_is_lines(file)
        check_heads(self._files)
        for file in self._files:
            yield from read_examples(file)


class ExampleSource:
    """Samples of one or more examples each.

    With `tells_documents` they come with `document_lengths`: the places of each example, and those
    of the padding, if any, as one more document.

    Args:
        examples: numbers of the `Encoder`, a document per example.
        samples: the examples of each sample, a document per sample.
        pad_id: the token of places that are left.
    """

    def __init__(
        self,
        examples: TokenStore,
        samples: TokenStore,
        *,
        seq_len: int,
        pad_id: int,
        tells_documents: bool,
    ) -> None:
        self.stores: Sequence[TokenStore] = [examples]
        self._samples = samples
        self._seq_len, self._pad_id = seq_len, pad_id
        self._tells_documents = tells_documents
        self.num_samples = samples.num_documents

    def __getitem__(self, i: int) -> Samples:
        [examples] = self.stores
        tokens = torch.full((self._seq_len,), self._pad_id)
        labels = torch.full((self._seq_len,), IGNORED)
        lengths: list[int] = []
        begin = 0
        for number in self._samples.document(i):
            row = examples.document(number)[: self._seq_len + 1]
            row = torch.from_numpy(row.astype(np.int64))
            ids, due = row >> 1, (row & 1).bool()
            end = begin + len(row) - 1
            tokens[begin:end] = ids[:-1]
            labels[begin:end] = torch.where(due[1:], ids[1:], IGNORED)
            lengths.append(end - begin)
            begin = end
        if not self._tells_documents:
            return {"tokens": tokens, "labels": labels}
        if begin < self._seq_len:
            lengths.append(self._seq_len - begin)
        return {"tokens": tokens, "labels": labels, "document_lengths": torch.tensor(lengths)}


def build_examples(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    seed: int,
    held_out: bool = False,
    side: Side | None = None,
) -> Dataset:
    """Return the samples that `[training]` describes; examples are tokenised unless that was done.

    `held_out`: of generated examples the part that is never trained on. `side`: of all examples
    those that are held out by their hash, or the others. Raises DataError for examples or a
    template that are missing or wrong, and when none is usable.
    """
    template = find_template(
        training.chat_template, tokenizer=tokenizer, tokenizer_path=tokenizer_path
    )
    source: FileExamples | SyntheticExamples = SyntheticExamples(held_out=held_out)
    if training.dataset == "examples":
        source = FileExamples([f for entry in training.dataset_path for f in find_files(entry)])
    template_hash = _hash(template)
    examples, found = cached(
        [FORMAT, tokenizer.fingerprint, template_hash, source.name, source.identity()],
        what=source.name,
        cache=training.dataset_cache,
        vocab_size=2 * tokenizer.vocab_size,
        write=lambda writer: _encode(source, Encoder(tokenizer, template), writer=writer),
    )
    content = examples.content_hash()
    divided = side.fingerprint() if side else {}
    plan = Plan(training.seq_len, seed, training.packing, training.long_examples)
    groups, planned = cached(
        [FORMAT, ORDER, content, *plan, *divided.items()],
        what=f"the samples of {source.name}",
        cache=training.dataset_cache,
        vocab_size=examples.num_documents,
        write=lambda writer: _plan(examples, plan, side, writer=writer),
    )
    _report(found, planned, plan=plan)
    rows = ExampleSource(
        examples,
        groups,
        seq_len=training.seq_len,
        pad_id=tokenizer.eos_id,
        tells_documents=tells_documents(training),
    )
    return Dataset(
        [rows],
        seed=seed,
        num_epochs=training.num_epochs,
        fingerprint={
            "data": content,
            "tokenizer": tokenizer.fingerprint,
            "chat template": template_hash,
            "packing": training.packing,
            "long examples": training.long_examples,
            "order": f"{ORDER} of examples",
            **divided,
            "seq_len": str(training.seq_len),
            "seed": str(seed),
        },
    )


def _hash(template: ChatTemplate | None) -> str:
    if template is None:
        return "none"
    parts = [template.source, sorted(template.variables.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _encode(
    source: FileExamples | SyntheticExamples, encoder: Encoder, *, writer: StoreWriter
) -> dict[str, Any]:
    """Write the rows of all examples in which there is something to learn."""
    num_skipped = 0
    examples = source.examples()
    while batch := [*islice(examples, EXAMPLES_AT_ONCE)]:
        for row in encoder.encode(batch):
            if row is None:
                num_skipped += 1
            else:
                writer.add(row, ends_document=True)
    if not writer.num_documents and not num_skipped:
        raise DataError(f"data must hold examples, {source.name} has blank lines alone; add some")
    if not writer.num_documents:
        raise DataError(
            f"there must be an example with an answer to learn, {source.name} has "
            f"{amount(num_skipped, 'example')}, and no assistant's words or completion in any; "
            f"if there are such, see what the {{% generation %}} marks of the chat template hold"
        )
    return {
        "source": source.name,
        "num_examples": writer.num_documents + num_skipped,
        "without_answer": num_skipped,
        "without_end": encoder.num_without_end,
    }


class Plan(NamedTuple):
    """What decides which examples share a sample."""

    seq_len: int
    seed: int
    packing: Literal["packed", "padded"]
    long_examples: Literal["truncate", "skip"]


def _plan(
    examples: TokenStore, plan: Plan, side: Side | None, *, writer: StoreWriter
) -> dict[str, Any]:
    """Write the numbers of the examples of each sample."""
    # neighbours in a file are alike; this order is not that of the samples, source 0
    order = Permutation(examples.num_documents, seed=plan.seed, epoch=0, source=1)
    counts: Counter[str] = Counter()
    numbers: list[int] = []
    lengths: list[int] = []
    for number in (order[i] for i in range(examples.num_documents)):
        row = examples.document(number)
        if side is not None and not side.has(row):
            counts["other_side"] += 1
            continue
        if len(row) > plan.seq_len + 1:
            counts["too_long"] += 1
            if plan.long_examples == "skip":
                continue
            row = row[: plan.seq_len + 1]
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
        raise DataError(
            f"there must be an example with an answer within training.seq_len = {plan.seq_len} "
            f"tokens, found none in {amount(ours, 'example')}; raise training.seq_len"
        )
    groups: Iterable[list[int]] = ([place] for place in range(len(lengths)))
    if plan.packing == "packed":
        groups = pack(lengths, capacity=plan.seq_len, window=WINDOW)
    for group in groups:
        writer.add(np.array([numbers[place] for place in group]), ends_document=True)
    return {
        "num_used": len(numbers),
        "num_places": sum(lengths),
        "num_samples": writer.num_documents,
        **counts,
    }


def _report(found: Mapping[str, Any], planned: Mapping[str, Any], *, plan: Plan) -> None:
    """Say once what became of the examples."""
    seq_len = plan.seq_len
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
            "%s: longer than training.seq_len = %d: %s (long_examples: %s); left out: %s without "
            "an answer, and %d without one in the first %s",
            found["source"],
            seq_len,
            amount(long, "example"),
            plan.long_examples,
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
