"""Which samples made the batch of a step, and in which steps a document was.

    python -m torchtitan audit explain RUN --step 100 --text
    python -m torchtitan audit explain RUN --document data/a.jsonl:17

No log is needed: a step's position gives the numbers of its samples, the permutation gives their
places in the data, and both can be computed backwards.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan.base.custom import add_trust_code, trusting_stored
from torchtitan.base.errors import ConfigError, DataError, printable
from torchtitan.base.log import plural
from torchtitan.base.urls import local_path
from torchtitan.data.dataset import Dataset
from torchtitan.tools.audit.history import Stretch, read_history, stretch_of
from torchtitan.tools.audit.places import Places, Span
from torchtitan.tools.audit.replay import replay, replay_lines

SHOWN_CHARS = 60
"""Of a document's text, on one line."""


def main(argv: Sequence[str]) -> int:
    """Print the samples of a step, or the steps of a document; raise UserError for mistakes."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan audit explain",
        description="Tell which samples and documents made the batch of a step.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the job.dump_folder of the run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="explain the batch of this step")
    what.add_argument(
        "--document",
        metavar="FILE:ROW",
        help="find the steps of a document; FILE alone finds all that it holds",
    )
    parser.add_argument(
        "--world_size", type=int, help="ranks after the last checkpoint (as the last start had)"
    )
    parser.add_argument("--text", action="store_true", help="with the text of each part")
    parser.add_argument(
        "--replay", action="store_true", help="train the step again and look into it"
    )
    parser.add_argument("--out", type=local_path, help="keep what --replay writes in this folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_trust_code(parser)
    arguments, options = parser.parse_known_args(argv)
    if (options or arguments.out) and not arguments.replay:
        given = " ".join(options) or "--out"
        raise ConfigError(f"settings of another layout belong to --replay, got {given}; remove it")
    with trusting_stored(arguments.trust_code):
        return _explain(arguments, options)


def _explain(arguments: argparse.Namespace, options: Sequence[str]) -> int:
    # of a replay it is the layout of that
    ranks = None if arguments.replay else arguments.world_size
    history = read_history(arguments.run, world_size=ranks)
    if arguments.step is not None:
        found = explain_step(history, arguments.step, text=arguments.text)
        lines = _step_lines(found)
        if arguments.replay:
            found["replay"] = replay(
                arguments.run,
                history,
                found,
                out=arguments.out,
                world_size=arguments.world_size,
                options=options,
            )
            path = history[-1].config.model.tokenizer_path
            lines = replay_lines(found, tokenizer_path=path)
    elif arguments.text:
        raise ConfigError("--text belongs to --step, got it with --document; remove it")
    else:
        found = explain_document(history, arguments.document)
        lines = _document_lines(found)
    sys.stdout.write(json.dumps(found) if arguments.json else printable("\n".join(lines)))
    sys.stdout.write("\n")
    return 0


def explain_step(
    history: Sequence[Stretch], step: int, *, text: bool = False, places: Places | None = None
) -> dict[str, Any]:
    """Return each sample of a step: number, hash, rank, microbatch, and the documents in it.

    `places`: opened before, to explain many steps.

    Raises:
        UserError: The run has no such step, or its data changed.
    """
    stretch = stretch_of(history, step)
    places = places or Places.of(stretch.config)
    if stretch.fingerprint is not None:
        places.check(stretch.fingerprint)
    numbers = stretch.samples(step)
    first, last, total = numbers[0], numbers[-1], places.dataset.num_samples
    if first < 0 or (total is not None and last >= total):
        raise DataError(
            f"step {step} would read the samples {first} to {last}, and the data have "
            f"{'none before 0' if first < 0 else total}; the run ended before, or the settings "
            f"changed: see the checkpoints"
        )
    spans = {k: places.spans(k) for k in numbers}
    wanted: dict[tuple[int, int], set[int]] = {}
    for span in (span for each in spans.values() for span in each):
        wanted.setdefault(span.store, set()).add(span.document)
    for store, documents in wanted.items():
        places.wheres(store, documents)
    return {
        "step": step,
        "position": first,
        "position_by": stretch.said_by,
        "doubt": stretch.doubt or None,
        "layout": str(stretch.dims),
        "samples": [
            _describe_sample(places, stretch, k, spans=spans[k], text=text) for k in numbers
        ],
    }


def _describe_sample(
    places: Places, stretch: Stretch, k: int, *, spans: Sequence[Span], text: bool
) -> dict[str, Any]:
    dp_rank, microbatch, ranks = stretch.reader_of(k)
    found: dict[str, Any] = {
        "sample": k,
        "hash": places.hash(k),
        "dp_rank": dp_rank,
        "microbatch": microbatch,
        "ranks": ranks,
    }
    if isinstance(places.dataset, Dataset):
        source, epoch, i = places.dataset.place_of(k)
        found |= {"source": source, "epoch": epoch, "number_in_source": i}
    tokens = places.read(k)["tokens"] if text else None
    found["documents"] = []
    for span in spans:
        document = {
            "where": places.wheres(span.store, (span.document,))[span.document],
            "document": span.document,
            "first_token": span.first,
            "num_tokens": span.num_tokens,
            "at": span.at,
        }
        if tokens is not None:
            part = tokens[span.at : span.at + span.num_tokens]
            document["text"] = places.tokenizer.decode(part.tolist())
        found["documents"].append(document)
    if tokens is not None and not spans:
        found["text"] = places.tokenizer.decode(tokens.tolist())
    return found


def explain_document(history: Sequence[Stretch], name: str) -> dict[str, Any]:
    """Return the steps of each document that `name` means, up to the run's last step.

    Raises:
        UserError: There is none, or the data changed.
    """
    if not history:
        raise ConfigError("the run must have steps to look for a document in, and it has none")
    visits: list[dict[str, Any]] = []
    places = Places.of(history[-1].config)
    documents = places.find(name)
    for stretch in history:
        if stretch.fingerprint is not None:
            places.check(stretch.fingerprint)
        for store, document in documents:
            for k in _reads(places, stretch, store, document):
                dp_rank, microbatch, ranks = stretch.reader_of(k)
                spans = [
                    span
                    for span in places.spans(k)
                    if (span.store, span.document) == (store, document)
                ]
                visits += [
                    {
                        "step": stretch.step_of(k),
                        "sample": k,
                        "source": store[0],
                        "document": document,
                        "first_token": span.first,
                        "num_tokens": span.num_tokens,
                        "dp_rank": dp_rank,
                        "microbatch": microbatch,
                        "ranks": ranks,
                    }
                    for span in spans
                ]
    visits.sort(key=lambda visit: (visit["step"], visit["sample"], visit["first_token"]))
    return {
        "document": name,
        "num_documents": len(documents),
        "last_step": history[-1].last_step,
        "position_by": [stretch.said_by for stretch in history],
        "doubt": "; ".join(filter(None, (stretch.doubt for stretch in history))) or None,
        "visits": visits,
    }


def _reads(
    places: Places, stretch: Stretch, store: tuple[int, int], document: int
) -> Iterator[int]:
    """Yield the samples of a stretch that read a document, epoch by epoch."""
    assert isinstance(places.dataset, Dataset)
    last = stretch.samples(stretch.last_step)[-1]
    if (total := places.dataset.num_samples) is not None:
        # the last step is whole
        left = stretch.gaps.place(total) - stretch.begin
        if left < stretch.batch:
            return
        last = min(last, stretch.samples(stretch.first_step + left // stretch.batch - 1)[-1])
    for i in places.samples_of(store, document):
        for epoch in range(places.dataset.epoch_of(store[0], last + 1) + 1):
            k = places.dataset.number_of(store[0], epoch, i)
            if k <= last and stretch.step_of(k) is not None:
                yield k


def _step_lines(found: dict[str, Any]) -> Iterator[str]:
    samples = found["samples"]
    yield (
        f"step {found['step']}: samples {samples[0]['sample']} to {samples[-1]['sample']}, "
        f"{found['layout']}; position by {found['position_by']}"
    )
    if found["doubt"]:
        yield f"not sure: {found['doubt']}"
    for sample in samples:
        ranks = ", ".join(map(str, sample["ranks"]))
        line = f"sample {sample['sample']}  rank {ranks}  microbatch {sample['microbatch']}"
        if "source" in sample:
            line += f"  source {sample['source']}, epoch {sample['epoch']}"
        yield f"{line}  hash {sample['hash'] or 'unknown: a stream cannot go back'}"
        for one in sample["documents"]:
            last = one["first_token"] + one["num_tokens"] - 1
            yield f"  {one['where']}: tokens {one['first_token']} to {last}{_shown(one)}"
        if not sample["documents"]:
            yield f"  data of your own, which do not say what it comes from{_shown(sample)}"


def _shown(one: dict[str, Any]) -> str:
    if "text" not in one:
        return ""
    text: str = one["text"]
    return f"\n    {text[:SHOWN_CHARS]!r}{' ...' if len(text) > SHOWN_CHARS else ''}"


def _document_lines(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['document']} ({plural(found['num_documents'], 'document')}): read "
        f"{plural(len(found['visits']), 'time')} up to step {found['last_step']}; position by "
        f"{'; '.join(found['position_by'])}"
    )
    if found["doubt"]:
        yield f"not sure: {found['doubt']}"
    for visit in found["visits"]:
        last = visit["first_token"] + visit["num_tokens"] - 1
        yield (
            f"step {visit['step']}  sample {visit['sample']}  rank "
            f"{', '.join(map(str, visit['ranks']))}  microbatch {visit['microbatch']}: document "
            f"{visit['document']}, tokens {visit['first_token']} to {last}"
        )
