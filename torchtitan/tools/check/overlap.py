"""Find validation data that are also training data, in samples of both.

A validation loss on training documents is low, and does not measure generalization. Common files
are found by device and inode, under any name. Documents are found by content, in any file: up to
`NUM_DOCUMENTS` evenly spread documents of each side are compared by length and their first and last
tokens. So the work does not grow with the data, except for tokenizing them, which the first rank
does as in the job.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan.data.dataset import build_samples
from torchtitan.data.files import find_files
from torchtitan.data.holdout import content_number
from torchtitan.data.settings import SUPERVISED
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.job import Config
from torchtitan.tools.check.ranks import Checked, Failed, Ranks, attempt
from torchtitan.validate import build_held_out, validation_source

NUM_DOCUMENTS = 1 << 14
NUM_TOKENS = 128
NUM_CHARACTERS = 40


def check_overlap(ranks: Ranks, config: Config) -> Iterator[Checked]:
    """Look for validation data that are also training data, unless they are held out of these."""
    if not config.validation.enable or config.validation.holdout_fraction is not None:
        return
    found = attempt(lambda: find_overlap(config)) if ranks.launch.rank == 0 else None
    if isinstance(found, Failed):
        found = found.why
    summary = "overlaps the training data"
    if not found:
        summary = "no overlap with the training data in the documents compared"
    yield Checked(name="validation", summary=summary, faults=[found] if found else [])


def find_overlap(config: Config) -> str | None:
    """Describe the training data that validation reads, if there are any."""
    training = config.training
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    trained_on = build_samples(
        training,
        tokenizer=tokenizer,
        tokenizer_path=config.model.tokenizer_path,
        seed=config.debug.seed,
    )
    source = validation_source(training, config.validation)
    held_out = build_held_out(
        source,
        holdout_fraction=config.validation.holdout_fraction,
        tokenizer_path=config.model.tokenizer_path,
    )
    if held_out.fingerprint["data"] == trained_on.fingerprint["data"]:
        return "validation reads the training data"
    ours, theirs = (
        {
            (status.st_dev, status.st_ino): file
            for path in paths
            for file in find_files(path, cache=training.dataset_cache)
            for status in [file.stat()]
        }
        for paths in (source.paths, training.paths)
    )
    if shared := ours.keys() & theirs.keys():
        return f"validation reads training files, such as {ours[min(shared)]}"
    supervised, other = (kind in SUPERVISED for kind in (source.dataset, training.dataset))
    # text and examples are stored as different numbers, and custom data are not stored
    if not held_out.stores or not trained_on.stores or supervised != other:
        return None
    return describe_shared_documents(
        held_out.stores, trained_on.stores, tokenizer=tokenizer, shift=int(supervised)
    )


def _sample(stores: Sequence[TokenStore], *, end: int) -> dict[int, npt.NDArray[Any]]:
    """Return a sample of the documents, without the `end` token, by number."""
    ends = list(accumulate(store.num_documents for store in stores))
    count = min(ends[-1], NUM_DOCUMENTS)
    documents = {}
    for number in (i * ends[-1] // count for i in range(count)):
        store = bisect_right(ends, number)
        tokens = stores[store].document(number - (ends[store - 1] if store else 0))
        tokens = tokens[:-1] if len(tokens) and tokens[-1] == end else tokens
        if len(tokens):
            documents[number] = tokens
    return documents


def _key(tokens: npt.NDArray[Any]) -> tuple[int, int]:
    both_ends = np.concatenate([tokens[:NUM_TOKENS], tokens[-NUM_TOKENS:]])
    return len(tokens), content_number(both_ends)


def describe_shared_documents(
    held_out: Sequence[TokenStore],
    trained_on: Sequence[TokenStore],
    *,
    tokenizer: Tokenizer,
    shift: int,
) -> str | None:
    """Return the number of common documents and the first characters of one, or None.

    Args:
        held_out: Stores of the validation.
        trained_on: Stores of the training.
        tokenizer: The tokenizer of both.
        shift: Bits below the id in a stored number: 1 for examples, else 0.
    """
    end = (tokenizer.eos_id << shift) | shift
    held, trained = (_sample(stores, end=end) for stores in (held_out, trained_on))
    known = set(map(_key, trained.values()))
    shared = [number for number, tokens in held.items() if _key(tokens) in known]
    if not shared:
        return None
    start = tokenizer.decode((held[shared[0]][:NUM_CHARACTERS] >> shift).tolist())
    return (
        f"{len(shared)} of {len(held)} compared validation documents are training documents, such "
        f"as document {shared[0] + 1} ({start[:NUM_CHARACTERS]!r})"
    )
