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
from torchtitan.data.sampler import Mixture, Permutation
from torchtitan.data.settings import PREFERENCES
from torchtitan.data.store import StoreWriter, TokenStore, open_writer
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.finetune.chat import ChatTemplate, find_template
from torchtitan.finetune.encoder import Encoder, is_answered
from torchtitan.finetune.sources import find_sources, label_all, parser_of

if TYPE_CHECKING:
    from torchtitan.data.loader import Samples
    from torchtitan.data.settings import TrainingConfig

logger = logging.getLogger(__name__)
# parts of fingerprints: raise them if the same examples get other tokens or samples
FORMAT, PAIRS, ORDER = "examples 6", "pairs 1", "1"
Fate = Literal["kept", "cut", "without an answer", "without one within seq_len", "too long"]
"""Result for an example: "kept" and "cut" are trained on, the rest is left out."""
PACKING_WINDOW = 1 << 14
UNKNOWN = torch.iinfo(torch.int64).min
"""Reference of an answer before it is computed."""


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
        tokens = torch.full((self._seq_len,), self._pad_id)
        labels = torch.full((self._seq_len,), IGNORED)
        lengths: list[int] = []
        start = 0
        for numbers in self._rows(i):
            row = torch.from_numpy(numbers.astype(np.int64))
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

    def _rows(self, i: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the numbers of each example of a sample."""
        [examples] = self.stores
        for index in self.samples.document(i):
            yield examples.document(index)[: self._seq_len + 1]


class PairSource(ExampleSource):
    """Samples of one or more pairs of answers, each with its prompt.

    The labels of a sample are targets, int64 (S, 4). At each token: its label, and the number of
    the answer in the sample, a chosen one before the rejected one of its pair. At the first label
    of an answer: its reference, see `finetune/preferences.py`, and of a chosen one the number of
    the pair, elsewhere 0 and -100.

    `examples` has two documents per pair, and `samples` the numbers of pairs.
    """

    def __init__(
        self, examples: TokenStore, samples: TokenStore, training: TrainingConfig, *, pad_id: int
    ) -> None:
        super().__init__(examples, samples, training, pad_id=pad_id)
        self.references = torch.full((examples.num_documents,), UNKNOWN)
        """Of each document of `examples`. They may be set in place."""

    def __getitem__(self, i: int) -> Samples:
        sample = super().__getitem__(i)
        lengths, labels = sample["document_lengths"], sample["labels"]
        answers = torch.arange(len(lengths)).repeat_interleave(lengths)
        references, pairs = torch.zeros_like(labels), torch.full_like(labels, IGNORED)
        start = 0
        for number, length in zip(self._answers(i), lengths.tolist(), strict=False):
            first = start + int((labels[start : start + length] != IGNORED).nonzero()[0])
            references[first] = self.references[number]
            if number % 2 == 0:
                pairs[first] = number // 2
            start += length
        return sample | {"labels": torch.stack([labels, answers, references, pairs], dim=-1)}

    def _answers(self, i: int) -> list[int]:
        return [2 * int(pair) + j for pair in self.samples.document(i) for j in range(2)]

    def _rows(self, i: int) -> Iterator[npt.NDArray[Any]]:
        [examples] = self.stores
        for chosen, rejected in zip(*[map(examples.document, self._answers(i))] * 2, strict=True):
            yield from cut_pair(chosen, rejected, seq_len=self._seq_len)


def cut_pair(
    chosen: npt.NDArray[Any], rejected: npt.NDArray[Any], *, seq_len: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the numbers of a pair without the beginning of its prompt, so that both fit into
    `seq_len`. Of the prompt at least a token stays, so they may still not fit."""
    excess = len(chosen) + len(rejected) - 2 - seq_len
    length = int(min((row & 1).argmax() for row in (chosen, rejected)))  # of the prompt
    cut = max(0, min(-(-excess // 2), length - 1))
    return chosen[cut:], rejected[cut:]


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
    template_hash, special = _hash(encoder.template), training.special_tokens_in_examples
    pairs = training.dataset in PREFERENCES
    decides = [PAIRS if pairs else FORMAT, tokenizer.fingerprint, template_hash, special]
    decides += [] if training.train_on == "all" else [training.train_on]
    part = holdout.fingerprint()
    seq_len, packing, long_examples = training.seq_len, training.packing, training.long_examples
    sources, contents = list[ExampleSource](), list[str]()
    for corpus in find_sources(training, holdout=holdout, once=once):

        def encode(folder: Path, corpus: Corpus = corpus) -> Mapping[str, Any]:
            encoder.notes.clear()
            with open_writer(folder / "tokens", vocab_size=2 * tokenizer.vocab_size) as writer:
                return _encode(corpus, encoder, training, writer=writer)

        folder, encoded = cached(
            [*decides, corpus.name, once(corpus.identity)],
            cache=training.dataset_cache,
            build=encode,
        )
        examples = TokenStore(folder / "tokens")

        def plan(folder: Path, examples: TokenStore = examples) -> Mapping[str, Any]:
            with open_writer(folder / "samples", vocab_size=examples.num_documents) as writer:
                return _plan(
                    examples, training, pairs=pairs, seed=seed, holdout=holdout, writer=writer
                )

        contents.append(examples.content_hash())
        folder, planned = cached(
            [decides[0], ORDER, contents[-1], seq_len, seed, packing, long_examples, *part.items()],
            cache=training.dataset_cache,
            build=plan,
        )
        samples = TokenStore(folder / "samples")
        _log(encoded, planned, training, holdout=holdout)
        build_source = PairSource if pairs else ExampleSource
        sources.append(build_source(examples, samples, training, pad_id=tokenizer.eos_id))
    weights = training.dataset_weights if len(sources) > 1 else (1.0,)
    weighted = {"weights": ":".join(map(str, Mixture(weights).weights))} if sources[1:] else {}
    return Dataset(
        sources,
        weights=weights,
        seed=seed,
        num_epochs=training.num_epochs,
        fingerprint={
            "data": ",".join(contents),
            "tokenizer": tokenizer.fingerprint,
            "chat template": template_hash,
            "packing": packing,
            "long examples": long_examples,
            "order": f"{ORDER} of examples",
            **weighted,
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


def fate_of_pair(
    chosen: npt.NDArray[Any], rejected: npt.NDArray[Any], training: TrainingConfig
) -> Fate:
    """Return the same of a pair, of which only the prompt may be cut."""
    if len(chosen) + len(rejected) - 2 <= training.seq_len:
        return "kept"
    if training.long_examples == "skip":
        return "too long"
    rows = cut_pair(chosen, rejected, seq_len=training.seq_len)
    fits = sum(len(row) - 1 for row in rows) <= training.seq_len
    return "cut" if fits else "without one within seq_len"


def _hash(template: ChatTemplate | None) -> str:
    if template is None:
        return "none"
    parts = [template.source, sorted(template.variables.items())]
    if template.with_tools is not None:
        parts.append(template.with_tools.source)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _encode(
    source: Corpus, encoder: Encoder, training: TrainingConfig, *, writer: StoreWriter
) -> dict[str, Any]:
    """Write the numbers of all examples with an answer; return notes about them."""
    num_skipped, size = 0, 1 + (training.dataset in PREFERENCES)
    rows = (row for _, row in label_all(source, encoder, parse=parser_of(training)))
    for group in zip(*[rows] * size, strict=True):
        if all(map(is_answered, group)):
            for row in group:
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
        "num_examples": writer.num_documents // size + num_skipped,
        "without_answer": num_skipped,
        "notes": encoder.notes,
    }


def _plan(
    examples: TokenStore,
    training: TrainingConfig,
    *,
    pairs: bool,
    seed: int,
    holdout: Holdout,
    writer: StoreWriter,
) -> dict[str, Any]:
    """Write the indices of the examples of each sample; return notes about them."""
    seq_len = training.seq_len
    # shuffled, as neighbors in a file are alike; source 0 is the order of the samples
    num_examples = examples.num_documents // (1 + pairs)
    order = Permutation(num_examples, seed=seed, epoch=0, source=1)
    counts = Counter(other_side=0, too_long=0, answer_cut_off=0, num_labels=0)
    indices: list[int] = []
    lengths: list[int] = []
    for index in (order[i] for i in range(num_examples)):
        rows = [examples.document((1 + pairs) * index + j) for j in range(1 + pairs)]
        if not holdout.selects(rows[0]):
            counts["other_side"] += 1
            continue
        counts["too_long"] += sum(len(row) - 1 for row in rows) > seq_len
        fate = fate_of_pair(rows[0], rows[1], training) if pairs else fate_of(rows[0], training)
        counts["answer_cut_off"] += fate == "without one within seq_len"
        if fate not in ("kept", "cut"):
            continue
        rows = [*cut_pair(rows[0], rows[1], seq_len=seq_len)] if pairs else [rows[0][: seq_len + 1]]
        counts["num_labels"] += sum(int((row[1:] & 1).sum()) for row in rows)
        indices.append(index)
        lengths.append(sum(len(row) - 1 for row in rows))
    num_selected = num_examples - counts["other_side"]
    if not num_selected:
        raise holdout.too_small(f"none of {num_examples} examples")
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
