"""Weights in float8 with a scale for each block, as DeepSeek publishes them, read as numbers.

A matrix lies in `float8_e4m3fn`; beside it, under the same name and `_scale_inv`, are the scales of
its blocks of 128 x 128, by which they are multiplied. The product is taken in float32 and rounded
once, to the type of the parameter that it fills. A rank reads the part of the matrix that is its
own, and the scales that this part meets, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON

FLOAT8 = "F8_E4M3"
SCALE = "_scale_inv"
KEY = "quantization_config"
Blocks = tuple[int, int]
"""Rows and columns of one."""


def stored_blocks(config: StoredJSON) -> Blocks | None:
    """Return the blocks that a config.json says its weights are scaled by; None: they are not.

    Raises:
        CheckpointError: They are quantised in another way.
    """
    said = config.get(KEY)
    if said is None:
        return None
    blocks = said.get("weight_block_size") if isinstance(said, dict) else None
    fits = isinstance(blocks, list) and len(blocks) == 2
    fits = fits and all(type(n) is int and n > 0 for n in blocks or ())
    if not fits or said.get("quant_method") != "fp8" or said.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(
            f'{config.path} asks for what is not built: of {KEY} only quant_method "fp8" with a '
            f"weight_block_size of two numbers is read, got {str(said)[:80]}; take a model without "
            f"it"
        )
    assert blocks is not None
    return blocks[0], blocks[1]


class Scaled:
    """A matrix in float8 and its scales; slices of it are their products, float32."""

    def __init__(self, weight: Any, scale: Any, *, blocks: Blocks) -> None:
        self._weight, self._scale, self._blocks = weight, scale, blocks

    def __getitem__(self, places: Sequence[slice]) -> Tensor:
        rows, cols = places
        height, width = self._blocks
        part: Tensor = self._weight[rows, cols].float()
        top, left = rows.start // height, cols.start // width
        scale: Tensor = self._scale[top : ceil(rows.stop / height), left : ceil(cols.stop / width)]
        skipped = cols.start - left * width
        for number, of_row in enumerate(scale.float()):
            first = max((top + number) * height - rows.start, 0)
            last = (top + number + 1) * height - rows.start
            of_column = of_row.repeat_interleave(width)[skipped:][: part.shape[1]]
            part[first:last] *= of_column
        return part
