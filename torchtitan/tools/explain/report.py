"""The samples of a step and their documents, and the steps of a document."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchtitan.base.errors import ConfigError, DataError, printable
from torchtitan.base.log import plural
from torchtitan.data.dataset import Dataset
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.tools.explain.documents import RunData, StoreKey
from torchtitan.tools.explain.steps import Stretch, local_settings, read_history

SHOWN_CHARS = 60
"""Characters of a document's text on a line."""


def main(options: argparse.Namespace) -> int:
    """Print the samples of a step, or the steps of a document."""
    history = read_history(options.run, world_size=options.world_size)
    if not history:
        raise ConfigError("the run has no steps")
    if options.step is None:
        stretch = history[-1]
    elif not (stretches := [s for s in history if s.first_step <= options.step <= s.last_step]):
        last = history[-1].last_step
        raise ConfigError(f"--step must be one of the run's steps, 1 to {last}, got {options.step}")
    else:
        [stretch] = stretches
    data = RunData.of(
        local_settings(stretch.config, cache=options.dataset_cache, may_fetch=options.fetch)
    )
    if options.step is None:
        facts = explain_document(history, options.document, data=data)
        lines = _document_lines(facts)
    else:
        facts = explain_step(stretch, options.step, data=data, text=options.text)
        lines = _step_lines(facts)
    text = json.dumps(facts) if options.json else printable("\n".join(lines))
    sys.stdout.write(text + "\n")
    return 0


def explain_step(
    stretch: Stretch, step: int, *, data: RunData, text: bool = False
) -> dict[str, Any]:
    """Return each sample of a step: number, hash, ranks, microbatch and documents, with their texts
    if `text`. Raises DataError if the data ended before, or changed."""
    data.check(stretch.fingerprint)
    numbers = stretch.samples(step)
    first, last, total = numbers[0], numbers[-1], data.dataset.num_samples
    if first < 0 or (total is not None and last >= total):
        raise DataError(
            f"step {step} would read samples {first} to {last}, but the data have {total}; the run "
            f"ended before, or its settings changed"
        )
    spans = {k: data.spans(k) for k in numbers}
    names = data.names(span for group in spans.values() for span in group)
    samples = []
    for k in numbers:
        facts: dict[str, Any] = {"sample": k, "hash": data.hash(k), **stretch.reader_of(k)}
        if isinstance(data.dataset, Dataset):
            source, epoch, i = data.dataset.place_of(k)
            facts |= {"source": source, "epoch": epoch, "number_in_source": i}
        facts["documents"] = [
            {
                "where": names[span.store, span.document],
                "document": span.document,
                "first_token": span.first,
                "num_tokens": span.num_tokens,
                "at": span.at,
            }
            for span in spans[k]
        ]
        if text:
            _add_texts(facts, data.read(k)["tokens"], data.tokenizer)
        samples.append(facts)
    return {
        "step": step,
        "position": first,
        "position_by": stretch.origin,
        "doubt": stretch.doubt or None,
        "layout": str(stretch.dims),
        "samples": samples,
    }


def _add_texts(sample: dict[str, Any], tokens: Tensor, tokenizer: Tokenizer) -> None:
    """Add the text of each document, or that of a sample whose documents are unknown."""
    for document in sample["documents"]:
        at = document["at"]
        document["text"] = tokenizer.decode(tokens[at : at + document["num_tokens"]].tolist())
    if not sample["documents"]:
        sample["text"] = tokenizer.decode(tokens.tolist())


def explain_document(history: Sequence[Stretch], name: str, *, data: RunData) -> dict[str, Any]:
    """Return the steps of each document with this name, up to the run's last step; raise DataError
    if no document has this name, or the data changed."""
    visits: list[dict[str, Any]] = []
    documents = data.find(name)
    for stretch in history:
        data.check(stretch.fingerprint)
        for store, document in documents:
            for k in _reads(data, stretch, store, document):
                visits += [
                    {
                        "step": stretch.step_of(k),
                        "sample": k,
                        "source": store[0],
                        "document": document,
                        "first_token": span.first,
                        "num_tokens": span.num_tokens,
                        **stretch.reader_of(k),
                    }
                    for span in data.spans(k)
                    if (span.store, span.document) == (store, document)
                ]
    visits.sort(key=lambda visit: (visit["step"], visit["sample"], visit["first_token"]))
    return {
        "document": name,
        "num_documents": len(documents),
        "last_step": history[-1].last_step,
        "position_by": [stretch.origin for stretch in history],
        "doubt": "; ".join(filter(None, (stretch.doubt for stretch in history))) or None,
        "visits": visits,
    }


def _reads(data: RunData, stretch: Stretch, store: StoreKey, document: int) -> Iterator[int]:
    """Yield the samples of a stretch that read a document, epoch by epoch."""
    assert isinstance(data.dataset, Dataset)
    last_step, total = stretch.last_step, data.dataset.num_samples
    if total is not None:  # the data end with the last full batch
        left = stretch.skipped.offset_of(total) - stretch.start
        last_step = min(last_step, stretch.first_step + left // stretch.batch - 1)
        if last_step < stretch.first_step:
            return
    last = stretch.samples(last_step)[-1]
    for i in data.samples_of(store, document):
        for epoch in range(data.dataset.epoch_of(store[0], last + 1) + 1):
            k = data.dataset.number_of(store[0], epoch, i)
            if k <= last and stretch.step_of(k) is not None:
                yield k


def _step_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    samples = facts["samples"]
    yield (
        f"step {facts['step']}: samples {samples[0]['sample']} to {samples[-1]['sample']}, "
        f"{facts['layout']}; position by {facts['position_by']}"
    )
    if facts["doubt"]:
        yield f"not sure: {facts['doubt']}"
    for sample in samples:
        line = f"sample {sample['sample']}  {_reader(sample)}"
        if "source" in sample:
            line += f"  source {sample['source']}, epoch {sample['epoch']}"
        yield f"{line}  hash {sample['hash'] or 'unknown: a stream cannot go back'}"
        for document in sample["documents"]:
            yield f"  {document['where']}: {_tokens(document)}{_text(document)}"
        if not sample["documents"]:
            yield f"  custom data, whose documents are unknown{_text(sample)}"


def _document_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{facts['document']} ({plural(facts['num_documents'], 'document')}): read "
        f"{plural(len(facts['visits']), 'time')} up to step {facts['last_step']}; position by "
        f"{'; '.join(facts['position_by'])}"
    )
    if facts["doubt"]:
        yield f"not sure: {facts['doubt']}"
    for visit in facts["visits"]:
        yield (
            f"step {visit['step']}  sample {visit['sample']}  {_reader(visit)}: document "
            f"{visit['document']}, {_tokens(visit)}"
        )


def _reader(facts: Mapping[str, Any]) -> str:
    return f"rank {', '.join(map(str, facts['ranks']))}  microbatch {facts['microbatch']}"


def _tokens(part: Mapping[str, Any]) -> str:
    return f"tokens {part['first_token']} to {part['first_token'] + part['num_tokens'] - 1}"


def _text(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if text is None:
        return ""
    return f"\n    {text[:SHOWN_CHARS]!r}{' ...' if len(text) > SHOWN_CHARS else ''}"
