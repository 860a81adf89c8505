"""List the samples and documents of a step of a run, or the steps of a document.

    torchtitan explain RUN --step 100 --text
    torchtitan explain RUN --document data/a.jsonl:17

No log is needed: the position of a step gives the numbers of its samples, the permutation gives
their places in the data, and both can be inverted. Nothing that the run's settings name is
imported, and URLs are read only with `--fetch`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.base.errors import ConfigError, DataError, printable
from torchtitan.base.log import plural
from torchtitan.data.settings import DEFAULT_CACHE
from torchtitan.tools.verbs import Parser, build_parser, report_errors

if TYPE_CHECKING:
    from torchtitan.tools.explain.documents import RunData, Span, StoreKey
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
        lines = _document_lines(history, options.document, data=data)
    else:
        lines = _step_lines(stretch, step, data=data, text=options.text)
    for line in lines:
        sys.stdout.write(f"{printable(line)}\n")
    return 0


def explain_step(
    stretch: Stretch, step: int, *, data: RunData
) -> dict[int, list[tuple[str, Span]]]:
    """Return the documents of each sample of a step, with their names; raise DataError if the data
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
    return {
        k: [(names[span.store, span.document], span) for span in group]
        for k, group in spans.items()
    }


def explain_document(
    history: Sequence[Stretch], name: str, *, data: RunData
) -> list[tuple[int, int, Span]]:
    """Return step, sample and part of each visit of the documents with this name, in order, up to
    the run's last step; raise DataError if no document has this name, or the data changed."""
    visits = []
    documents = data.find(name)
    for stretch in history:
        data.check(stretch.fingerprint)
        for store, document in documents:
            for k in _reads(data, stretch, store, document):
                step = stretch.step_of(k)
                assert step is not None
                spans = (s for s in data.spans(k) if (s.store, s.document) == (store, document))
                visits += [(step, k, span) for span in spans]
    return sorted(visits, key=lambda visit: (visit[0], visit[1], visit[2].first))


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


def _step_lines(stretch: Stretch, step: int, *, data: RunData, text: bool) -> Iterator[str]:
    samples = explain_step(stretch, step, data=data)
    yield (
        f"step {step}: samples {min(samples)} to {max(samples)}, {stretch.dims}; position by "
        f"{stretch.origin}"
    )
    if stretch.doubt:
        yield f"not sure: {stretch.doubt}"
    for k, parts in samples.items():
        source, epoch, _ = data.dataset.place_of(k)
        yield f"{_reader(stretch, k)}  source {source}, epoch {epoch}  hash {data.hash(k)}"
        for name, span in parts:
            yield f"  {name}: {span}"
            if text:
                ids = data.tokens(k)[span.at : span.at + span.num_tokens].tolist()
                content = data.tokenizer.decode(ids)
                yield f"    {content[:SHOWN_CHARS]!r}{' ...' if len(content) > SHOWN_CHARS else ''}"


def _document_lines(history: Sequence[Stretch], name: str, *, data: RunData) -> Iterator[str]:
    visits = explain_document(history, name, data=data)
    yield f"{name}: read {plural(len(visits), 'time')} up to step {history[-1].last_step}"
    for stretch in history:
        yield f"steps {stretch.first_step} to {stretch.last_step}: position by {stretch.origin}"
        if stretch.doubt:
            yield f"not sure: {stretch.doubt}"
    for step, k, span in visits:
        stretch = next(s for s in history if s.first_step <= step <= s.last_step)
        yield f"step {step}  {_reader(stretch, k)}: document {span.document}, {span}"


def _reader(stretch: Stretch, k: int) -> str:
    ranks, microbatch = stretch.reader_of(k)
    return f"sample {k}  rank {', '.join(map(str, ranks))}  microbatch {microbatch}"


def _parser() -> Parser:
    parser = build_parser("explain", __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="job.dump_folder of the run")
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--step", type=int, metavar="N", help="explain the batch of this step")
    text = "find the steps of a document; FILE finds all of its documents"
    subject.add_argument("--document", metavar="FILE[:ROW]", help=text)
    text = "cache of tokens; default: as for new jobs"
    add("--dataset_cache", metavar="DIR", default=DEFAULT_CACHE, help=text)
    add("--fetch", action="store_true", help="read the URLs that the run's settings name")
    add("--text", action="store_true", help="print the text of each document")
    return parser
