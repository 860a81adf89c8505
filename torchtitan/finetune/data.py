"""Samples for supervised fine-tuning: one or more examples each, with the loss on the answers only.

Examples are tokenized once, and packing is planned once. Both results are token stores in the
cache, mapped by all ranks and workers; the second holds indices of examples in place of tokens. A
`Dataset` orders the samples, so a position is one number, and a run resumes on the next sample in
any layout.

The tensors of a sample are made when it is read. An example of n tokens takes n - 1 positions,
since its last token is only a label, and no label crosses from one example to the next. The rest is
filled with the end token, without labels; `length` is the number of tokens before it.

One example per sample would fill most of a batch with padding, and cutting examples, as with text,
would separate answers from their questions. So full examples are packed by best fit decreasing:
from the longest to the shortest, each into the sample where it leaves the least room. This takes at
most 11/9 of the fewest samples possible, plus a constant (Johnson, "Near-optimal bin packing
algorithms", 1973). Most fine-tuning data have many short examples, so little padding remains.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone
from torchtitan.base.log import plural
from torchtitan.data.corpus import Corpus
from torchtitan.data.dataset import IGNORED, Dataset, has_document_lengths
from torchtitan.data.holdout import ALL, Holdout
from torchtitan.data.prepare import cached
from torchtitan.data.sampler import Permutation
from torchtitan.data.store import StoreWriter, TokenStore, open_writer
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.finetune.chat import ChatTemplate, find_template
from torchtitan.finetune.encoder import Encoder, is_answered
from torchtitan.finetune.sources import find_examples, label_all

if TYPE_CHECKING:
    from torchtitan.data.loader import Samples
    from torchtitan.data.settings import TrainingConfig

logger = logging.getLogger(__name__)
# parts of fingerprints: raise them if the same examples get other tokens or samples
FORMAT, ORDER = "examples 6", "1"
Fate = Literal["kept", "cut", "without an answer", "without one within seq_len", "too long"]
"""Result for an example: "kept" and "cut" are trained on, the rest is left out."""
PACKING_WINDOW = 1 << 14


class ExampleSource:
    """Samples of one or more examples each.

    Each example is a document in `document_lengths`, and so is the padding.

    `examples` has the numbers of the `Encoder`, a document per example; `samples` the indices of
    examples, a document per sample.
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
        start = 0
        for index in self.samples.document(i):
            row = examples.document(index)[: self._seq_len + 1]
            row = torch.from_numpy(row.astype(np.int64))
            ids, trained = row >> 1, (row & 1).bool()
            end = start + len(row) - 1
            tokens[start:end] = ids[:-1]
            labels[start:end] = torch.where(trained[1:], ids[1:], IGNORED)
            lengths.append(end - start)
            start = end
        sample = {"tokens": tokens, "labels": labels, "length": torch.tensor(start)}
        if not self._has_lengths:
            return sample
        if start < self._seq_len:
            lengths.append(self._seq_len - start)
        return sample | {"document_lengths": torch.tensor(lengths)}


def build_examples(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    seed: int,
    holdout: Holdout = ALL,
    once: Once = alone,
) -> Dataset:
    """Build the dataset of examples that `[training]` describes, tokenized now or in the cache.

    `holdout` selects examples, `once` looks for files in one process of this machine. Raises
    DataError if examples or the template are missing or wrong, or no example has an answer.
    """
    encoder = build_encoder(training, tokenizer=tokenizer, tokenizer_path=tokenizer_path)
    source = find_examples(training, holdout=holdout, once=once)
    template_hash, special = _hash(encoder.template), training.special_tokens_in_examples
    decides = [FORMAT, tokenizer.fingerprint, template_hash, special]

    def encode(folder: Path) -> Mapping[str, Any]:
        with open_writer(folder / "tokens", vocab_size=2 * tokenizer.vocab_size) as writer:
            return _encode(source, encoder, writer=writer)

    def plan(folder: Path) -> Mapping[str, Any]:
        with open_writer(folder / "samples", vocab_size=examples.num_documents) as writer:
            return _plan(examples, training, seed=seed, holdout=holdout, writer=writer)

    folder, encoded = cached(
        [*decides, source.name, once(source.identity)], cache=training.dataset_cache, build=encode
    )
    examples = TokenStore(folder / "tokens")
    content = examples.content_hash()
    part = holdout.fingerprint()
    seq_len, packing, long_examples = training.seq_len, training.packing, training.long_examples
    folder, planned = cached(
        [FORMAT, ORDER, content, seq_len, seed, packing, long_examples, *part.items()],
        cache=training.dataset_cache,
        build=plan,
    )
    samples = TokenStore(folder / "samples")
    _log(encoded, planned, training, holdout=holdout)
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
            **part,
            "seq_len": str(seq_len),
            "seed": str(seed),
        },
    )


def build_encoder(
    training: TrainingConfig, *, tokenizer: Tokenizer, tokenizer_path: str
) -> Encoder:
    """Return what encodes the examples of `[training]`; raise DataError for a wrong template."""
    template = find_template(
        training.chat_template, tokenizer=tokenizer, tokenizer_path=tokenizer_path
    )
    return Encoder(tokenizer, template, special_tokens=training.special_tokens_in_examples)


def fate_of(row: npt.NDArray[Any], training: TrainingConfig) -> Fate:
    """Return whether an example with these numbers is trained on, or why not."""
    if not is_answered(row):
        return "without an answer"
    is_long = len(row) > training.seq_len + 1
    if is_long and training.long_examples == "skip":
        return "too long"
    if not is_answered(row[: training.seq_len + 1]):
        return "without one within seq_len"
    return "cut" if is_long else "kept"


def _hash(template: ChatTemplate | None) -> str:
    if template is None:
        return "none"
    parts = [template.source, sorted(template.variables.items())]
    if template.with_tools is not None:
        parts.append(template.with_tools.source)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _encode(source: Corpus, encoder: Encoder, *, writer: StoreWriter) -> dict[str, Any]:
    """Write the numbers of all examples with an answer; return notes about them."""
    num_skipped = 0
    for _, row in label_all(source, encoder):
        if is_answered(row):
            writer.add(row, ends_document=True)
        else:
            num_skipped += 1
    if not writer.num_documents:
        got = f"{plural(num_skipped, 'example')} without one" if num_skipped else "only blank lines"
        raise DataError(
            f"{source.name} must have an example with an assistant's message or a completion, got "
            f"{got}; a chat template with {{% generation %}} tags must tag the answers"
        )
    return {
        "source": source.name,
        "num_examples": writer.num_documents + num_skipped,
        "without_answer": num_skipped,
        "notes": encoder.notes,
    }


def _plan(
    examples: TokenStore,
    training: TrainingConfig,
    *,
    seed: int,
    holdout: Holdout,
    writer: StoreWriter,
) -> dict[str, Any]:
    """Write the indices of the examples of each sample; return notes about them."""
    seq_len = training.seq_len
    # shuffled, as neighbors in a file are alike; source 0 is the order of the samples
    order = Permutation(examples.num_documents, seed=seed, epoch=0, source=1)
    counts = Counter(other_side=0, too_long=0, answer_cut_off=0, num_labels=0)
    indices: list[int] = []
    lengths: list[int] = []
    for index in (order[i] for i in range(examples.num_documents)):
        row = examples.document(index)
        if not holdout.selects(row):
            counts["other_side"] += 1
            continue
        fate = fate_of(row, training)
        counts["too_long"] += len(row) > seq_len + 1
        counts["answer_cut_off"] += fate == "without one within seq_len"
        if fate not in ("kept", "cut"):
            continue
        row = row[: seq_len + 1]
        counts["num_labels"] += int((row[1:] & 1).sum())
        indices.append(index)
        lengths.append(len(row) - 1)
    num_selected = examples.num_documents - counts["other_side"]
    if not num_selected:
        raise holdout.too_small(f"none of {examples.num_documents} examples")
    if not indices:
        rule = (
            f"an example must have an answer in its first {seq_len} tokens, got none in "
            f"{plural(num_selected, 'example')}; raise seq_len"
        )
        raise DataError.at("seq_len", rule)
    groups: Iterable[list[int]] = ([i] for i in range(len(lengths)))
    if training.packing == "packed":
        groups = pack(lengths, capacity=seq_len, window=PACKING_WINDOW)
    for group in groups:
        writer.add(np.array([indices[i] for i in group]), ends_document=True)
    return {
        "num_used": len(indices),
        "num_padding": writer.num_documents * seq_len - sum(lengths),
        "num_samples": writer.num_documents,
        **counts,
    }


def _log(
    encoded: Mapping[str, Any],
    planned: Mapping[str, Any],
    training: TrainingConfig,
    *,
    holdout: Holdout,
) -> None:
    """Log how many examples are used, held out, padded, cut and left out."""
    num_answered = encoded["num_examples"] - encoded["without_answer"]
    num_samples, seq_len = planned["num_samples"], training.seq_len
    padding, loss = (
        100 * planned[key] / (num_samples * seq_len) for key in ("num_padding", "num_labels")
    )
    logger.info(
        f"{encoded['source']}: {planned['num_used']} of {plural(num_answered, 'example')} in "
        f"{plural(num_samples, 'sample')} of {plural(seq_len, 'token')}, {padding:.1f} % padding, "
        f"loss on {loss:.1f} %"
    )
    if holdout.fraction is not None and not holdout.held_out:
        logger.info(f"validation.holdout_fraction holds out {planned['other_side']} of them")
    problems = {
        f"longer than seq_len (long_examples: {training.long_examples})": planned["too_long"],
        f"no answer in the first {seq_len} tokens": planned["answer_cut_off"],
        "no answer": encoded["without_answer"],
    }
    for note, number in {**problems, **encoded["notes"]}.items():
        if number:
            logger.warning(f"{encoded['source']}: {plural(number, 'example')}: {note}")


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return groups of indices into `lengths` whose lengths sum to at most `capacity`.

    Each index is in one group. Equal lengths keep their order, so the groups depend on the lengths
    only.
    """
    assert all(0 < length <= capacity for length in lengths)
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free positions and number of each group, sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        best = bisect_left(room, (length, 0))
        if best == len(room):
            free, group = capacity, len(groups)
            groups.append([])
        else:
            free, group = room.pop(best)
        groups[group].append(index)
        if free > length:
            insort(room, (free - length, group))
    return groups


def pack(lengths: Sequence[int], *, capacity: int, window: int) -> Iterator[list[int]]:
    """Yield the groups of the first `window` lengths, then of the next `window`, and so on.

    So examples are packed with others near them, and a search covers at most a window.
    """
    for first in range(0, len(lengths), window):
        for group in best_fit(lengths[first : first + window], capacity=capacity):
            yield [first + index for index in group]
