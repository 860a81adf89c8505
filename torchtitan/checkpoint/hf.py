"""The same weights in two spellings: our parameters, and those of Hugging Face's files.

Two things differ. Names do, and a table of the model (`HFFormat`) tells them. And the rows of wq
and wk lie in another order: our rotation turns neighbouring channels (2i, 2i + 1), the layout of
Meta's weights, theirs turns i with i + D/2. Row 2i + p of a head is their row p D/2 + i. With the
names translated alone a model loads without a complaint and talks nonsense, so the order is in the
table too.

A rank reads the rows of its shard alone, and a shard may begin and end within a head. So the order
is told as runs: rows that lie one behind another in the file, and where they belong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import Tensor

from torchtitan.models.spec import DecoderConfig, HFFormat

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
HeadDim = Callable[[str], int | None]
"""The width of the heads that a parameter's rows are channels of, where those lie in halves; None:
they lie as ours."""
Places = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Where something goes, and where it comes from."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def their_name(ours: str, *, names: HFFormat) -> str:
    """Return what Hugging Face calls a parameter of ours."""
    theirs = _translated(ours, names.names)
    assert theirs is not None, f"the table of {names.architecture} says nothing of {ours}"
    return theirs


def our_name(theirs: str, *, names: HFFormat) -> str | None:
    """Return what we call a tensor of Hugging Face's; None: we have no such parameter."""
    return _translated(theirs, {value: key for key, value in names.names.items()})


def find_misnamed(
    ours: Collection[str], *, names: HFFormat, num_layers: int, tied: bool
) -> str | None:
    """Say which parameters of a model their files have no name for, and which they would lack.

    None: all of the one are all of the other.
    """
    due = {
        name.replace("*", str(layer))
        for name in names.names
        for layer in range(num_layers if "*" in name else 1)
        if not (tied and name == "output.weight")
    }
    wrong = {
        f"the files of a {names.architecture} have no name for": set(ours) - due,
        "the model lacks, of what they hold,": due - set(ours),
    }
    said = [
        f"{what} {', '.join(sorted(found)[:4])}{' ...' if len(found) > 4 else ''}"
        for what, found in wrong.items()
        if found
    ]
    return "; ".join(said) or None


def head_dim_of_rows(ours: str, *, names: HFFormat, architecture: DecoderConfig) -> int | None:
    """Return the width of the heads that a parameter's rows are channels of, in the order that
    differs; None: its rows lie as ours do."""
    return architecture.head_dim if _starred(ours) in names.rotary else None


def _translated(name: str, table: Mapping[str, str]) -> str | None:
    found, layer = table.get(_starred(name)), _LAYER.search(name)
    return found if found is None or layer is None else found.replace("*", layer[1])


def _starred(name: str) -> str:
    return _LAYER.sub("layers.*.", name)


def runs(start: int, count: int, *, head_dim: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield which of their rows make `count` of ours from `start` on: the rows in the file, and
    their places among these `count`."""
    if head_dim is None:
        yield slice(start, start + count), slice(0, count)
        return
    half = head_dim // 2
    for head in range(start // head_dim, -(-(start + count) // head_dim)):
        row = head * head_dim
        first, last = max(start - row, 0), min(start + count - row, head_dim)
        for p in (0, 1):
            # the pairs i with first <= 2i + p < last
            begin, end = (first - p + 1) // 2, (last - p + 1) // 2
            if begin < end:
                place = row + 2 * begin + p - start
                theirs = slice(row + p * half + begin, row + p * half + end)
                yield theirs, slice(place, place + 2 * (end - begin) - 1, 2)


def overlap(
    start: Sequence[int],
    lengths: Sequence[int],
    *,
    offsets: Sequence[int],
    sizes: Sequence[int],
    head_dim: int | None,
) -> Iterator[Places]:
    """Yield what of a region of our tensor, `lengths` from `start` on, lies in a piece of theirs,
    `sizes` from `offsets` on: the places in the region, and in the piece."""
    columns: list[tuple[slice, slice]] = []
    for ours, width, theirs, there in zip(
        start[1:], lengths[1:], offsets[1:], sizes[1:], strict=True
    ):
        first, last = max(ours, theirs), min(ours + width, theirs + there)
        if first >= last:
            return
        columns.append((slice(first - ours, last - ours), slice(first - theirs, last - theirs)))
    into, out_of = tuple(a for a, _ in columns), tuple(b for _, b in columns)
    for rows, place in runs(start[0], lengths[0], head_dim=head_dim):
        first, last = max(rows.start, offsets[0]), min(rows.stop, offsets[0] + sizes[0])
        if first < last:
            step = place.step or 1
            begin = place.start + step * (first - rows.start)
            ours_rows = slice(begin, begin + step * (last - first - 1) + 1, step)
            yield (ours_rows, *into), (slice(first - offsets[0], last - offsets[0]), *out_of)


def to_their_rows(weight: Tensor, *, head_dim: int | None) -> Tensor:
    """Put all rows of a parameter of ours into their order."""
    if head_dim is None:
        return weight
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
