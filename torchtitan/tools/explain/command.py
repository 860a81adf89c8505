"""What a run has read: the samples and documents of a step, or the steps of a document.

    torchtitan explain RUN --step 100 --text
    torchtitan explain RUN --document data/a.jsonl:17

No log is needed: the position of a step gives the numbers of its samples, the permutation gives
their places in the data, and both can be inverted. Nothing that the run's settings name is
imported, and URLs are read only with `--fetch`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.base.errors import ConfigError, DataError, printable
from torchtitan.base.log import plural
from torchtitan.data.settings import DEFAULT_CACHE
from torchtitan.tools.verbs import Parser, build_parser, report_errors

if TYPE_CHECKING:
    from torchtitan.tools.explain.documents import RunData, StoreKey
    from torchtitan.tools.explain.steps import Stretch

SHOWN_CHARS = 60
"""Characters of a document's text on a line."""


@report_errors
def main(argv: Sequence[str]) -> int:
    """Print the samples of a step, or the steps of a document; return the exit code."""
    options = _parser().parse_args(argv)
    if options.document is not None and options.text:
        raise ConfigError("--text requires --step, got --document")
    from torchtitan.tools.explain.documents import RunData, local_settings
    from torchtitan.tools.explain.steps import read_history

    history, step = read_history(options.run), options.step
    last = history[-1].last_step if history else 0
    wanted = last if step is None else step
    stretch = next((s for s in history if s.first_step <= wanted <= s.last_step), None)
    if stretch is None:
        raise ConfigError(f"--step must be one of the run's steps, 1 to {last}, got {step}")
    cache, may_fetch = options.dataset_cache, options.fetch
    data = RunData(local_settings(stretch.config, cache=cache, may_fetch=may_fetch))
    if step is None:
        facts = explain_document(history, options.document, data=data)
        lines = _document_lines(facts)
    else:
        facts = explain_step(stretch, step, data=data, text=options.text)
        lines = _step_lines(facts)
    text = json.dumps(facts) if options.json else printable("\n".join(lines))
    sys.stdout.write(f"{text}\n")
    return 0


def explain_step(
    stretch: Stretch, step: int, *, data: RunData, text: bool = False
) -> dict[str, Any]:
    """Return the samples of a step with their documents, and `text`; raise DataError if the data
    changed or end before."""
    data.check(stretch.fingerprint)
    numbers, total = stretch.samples(step), data.dataset.num_samples
    if numbers[0] < 0 or (total is not None and numbers[-1] >= total):
        raise DataError(
            f"step {step} would read samples {numbers[0]} to {numbers[-1]}, but the data have "
            f"{total}; the run ended before, or its settings changed"
        )
    spans = {k: [*data.spans(k)] for k in numbers}
    names = data.names(span for group in spans.values() for span in group)
    samples = []
    for k in numbers:
        source, epoch, _ = data.dataset.place_of(k)
        documents = []
        for span in spans[k]:
            part = {
                "where": names[span.store, span.document],
                "document": span.document,
                "first_token": span.first,
                "num_tokens": span.num_tokens,
                "at": span.at,
            }
            if text:
                ids = data.tokens(k)[span.at : span.at + span.num_tokens].tolist()
                part["text"] = data.tokenizer.decode(ids)
            documents.append(part)
        facts = {"sample": k, "hash": data.hash(k), "source": source, "epoch": epoch}
        samples.append({**facts, **stretch.reader_of(k), "documents": documents})
    return {
        "step": step,
        "position": numbers[0],
        "position_by": stretch.origin,
        "doubt": stretch.doubt or None,
        "layout": str(stretch.dims),
        "samples": samples,
    }


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
        "position_by": "; ".join(stretch.origin for stretch in history),
        "doubt": "; ".join(filter(None, (stretch.doubt for stretch in history))) or None,
        "visits": visits,
    }


def _reads(data: RunData, stretch: Stretch, store: StoreKey, document: int) -> Iterator[int]:
    """Yield the samples of a stretch that read a document, epoch by epoch."""
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
        yield (
            f"{_reader(sample)}  source {sample['source']}, epoch {sample['epoch']}  "
            f"hash {sample['hash']}"
        )
        for part in sample["documents"]:
            yield f"  {part['where']}: {_tokens(part)}"
            if (text := part.get("text")) is not None:
                yield f"    {text[:SHOWN_CHARS]!r}{' ...' if len(text) > SHOWN_CHARS else ''}"


def _document_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{facts['document']} ({plural(facts['num_documents'], 'document')}): read "
        f"{plural(len(facts['visits']), 'time')} up to step {facts['last_step']}; position by "
        f"{facts['position_by']}"
    )
    if facts["doubt"]:
        yield f"not sure: {facts['doubt']}"
    for visit in facts["visits"]:
        line = f"{_reader(visit)}: document {visit['document']}, {_tokens(visit)}"
        yield f"step {visit['step']}  {line}"


def _reader(facts: Mapping[str, Any]) -> str:
    ranks = ", ".join(map(str, facts["ranks"]))
    return f"sample {facts['sample']}  rank {ranks}  microbatch {facts['microbatch']}"


def _tokens(part: Mapping[str, Any]) -> str:
    return f"tokens {part['first_token']} to {part['first_token'] + part['num_tokens'] - 1}"


def _parser() -> Parser:
    parser = build_parser("explain", __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="job.dump_folder of the run")
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--step", type=int, metavar="N", help="explain the batch of this step")
    text = "find the steps of a document; FILE finds all of its documents"
    subject.add_argument("--document", metavar="FILE[:ROW]", help=text)
    text = "cache of tokens; default: that of new jobs"
    add("--dataset_cache", metavar="DIR", default=DEFAULT_CACHE, help=text)
    add("--fetch", action="store_true", help="read the URLs that the run's settings name")
    add("--text", action="store_true", help="print the text of each document")
    add("--json", action="store_true", help="print one JSON object")
    return parser
