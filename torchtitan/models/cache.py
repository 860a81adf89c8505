"""The KV cache of decoding: keys and values of all earlier tokens, so that each is computed once.

All prompts run through the model in one row, as documents that do not attend to each other: without
padding, and reading the weights once. Then the cache is split into a batch that ends in one column:
shorter prompts are padded on the left, and the next tokens of all sequences are one more column. So
decoding attends with one call per layer, and its mask has one value per cached token, whether or
not lengths differ. Padding on the right would need an index per sequence to write, and would not
leave the last W columns to a window. Attention sequence by sequence needs no padding, but one call
per sequence. So the prompts of one cache should have similar lengths.

Shapes: B batch, S sequence, T cached columns, H query heads, K key/value heads, G = H / K, D head
width, R width of a stored tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.base.device import to_device
from torchtitan.models.interface import Attend, Documents
from torchtitan.models.sizes import DecoderConfig


class LayerCache:
    """Cached keys and values of one layer.

    Latent attention stores two other tensors instead, each with its own heads and width. The first
    `append` determines dtype, heads and widths. Later ones write in place, for use without
    gradients.
    """

    def __init__(self, prompts: Documents) -> None:
        self._prompts = prompts if len(prompts.lengths[0]) > 1 else None
        self.stored: tuple[Tensor, Tensor] | None = None
        self.length = 0
        self.mask_B11T: Tensor | None = None
        """True for each column that is not padding; None if no column is."""

    def append(self, k_BKSR: Tensor, v_BKSR: Tensor) -> tuple[Tensor, Tensor]:
        """Store all prompts, or one more token per sequence, and return all columns so far."""
        if self.stored is None:
            self.stored, self.length = (k_BKSR, v_BKSR), k_BKSR.shape[2]
            return self.stored
        assert k_BKSR.shape[2] == 1, "feed one token after the prompts"
        assert self.length < self.stored[0].shape[2], "the cache is full"
        for stored, new in zip(self.stored, (k_BKSR, v_BKSR), strict=True):
            stored[:, :, self.length] = new[:, :, 0]
        self.length += 1
        k_BKTR, v_BKTR = (stored[:, :, : self.length] for stored in self.stored)
        return k_BKTR, v_BKTR

    def attend(
        self,
        q_BHSD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        *sinks: Tensor,
        attend_prompts: Attend,
        window: int | None = None,
    ) -> Tensor:
        """Attend from the tokens that were appended last to those up to their own.

        `attend_prompts` is the layer's attention, for the prompts. `window` is the number of keys
        per query, itself included. None: all. `sinks`: the layer's (H), if it has some.
        """
        if q_BHSD.shape[2] == k_BKTD.shape[2]:
            return attend_prompts(q_BHSD, k_BKTD, v_BKTD, self._prompts, *sinks)
        columns = slice(-min(window or self.length, self.length), None)
        mask = self.mask_B11T
        if mask is not None:
            mask = mask[..., : self.length][..., columns]
        # heads that share keys are queries of one head: the keys are read once, by fused kernels
        # that take a mask but no grouped heads
        q_BKGD = q_BHSD.squeeze(2).unflatten(1, (k_BKTD.shape[1], -1))
        k_BKTD, v_BKTD = k_BKTD[:, :, columns], v_BKTD[:, :, columns]
        if sinks:
            [sinks_H] = sinks
            scores_BKGT = (q_BKGD @ k_BKTD.mT).float() * q_BKGD.shape[-1] ** -0.5
            if mask is not None:
                scores_BKGT = scores_BKGT.where(mask, -torch.inf)
            sinks_BKG1 = sinks_H.float().view(*q_BKGD.shape[1:3], 1).expand(len(q_BKGD), -1, -1, 1)
            shares_BKGT = torch.cat((scores_BKGT, sinks_BKG1), -1).softmax(-1)[..., :-1]
            return (shares_BKGT.to(v_BKTD.dtype) @ v_BKTD).flatten(1, 2)[:, :, None]
        out_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BKTD, v_BKTD, attn_mask=mask)
        return out_BKGD.flatten(1, 2)[:, :, None]


class KVCache:
    """The caches of all layers.

    `prompt_lens` are the lengths of the prompts, which the model takes in one row.
    """

    def __init__(self, config: DecoderConfig, *, prompt_lens: Sequence[int]) -> None:
        self._prompts = Documents((tuple(prompt_lens),))
        self.layers = {str(i): LayerCache(self._prompts) for i in range(config.num_layers)}
        self._padding: list[int] | None = None

    @property
    def positions(self) -> list[list[int]]:
        """Positions of the next tokens: of the prompts in one row, then one for each sequence."""
        if self._padding is None:
            return [[at for length in self._prompts.lengths[0] for at in range(length)]]
        length = next(iter(self.layers.values())).length
        return [[length - padding] for padding in self._padding]

    @property
    def ends(self) -> list[int]:
        """Columns of the last token of each sequence, in the row that the model takes."""
        if self._padding is None:
            return [end - 1 for end in accumulate(self._prompts.lengths[0])]
        return [0]

    def split(self, *, num_more: int) -> None:
        """Give each prompt a row, with room for more tokens. Call this after the prompts."""
        lengths = list(self._prompts.lengths[0])
        longest = max(lengths)
        self._padding = [longest - length for length in lengths]
        for layer in self.layers.values():
            assert layer.stored is not None
            k, v = (
                torch.cat(
                    [
                        F.pad(x, (0, 0, longest - x.shape[2], num_more))
                        for x in stored.split(lengths, dim=2)
                    ]
                )
                for stored in layer.stored
            )
            layer.stored, layer.length = (k, v), longest
        self._mask_padding()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other sequences, and the columns that no other one needs."""
        assert self._padding is not None, "split the cache first"
        unused = min(self._padding[row] for row in rows)
        self._padding = [self._padding[row] - unused for row in rows]
        for layer in self.layers.values():
            assert layer.stored is not None
            k, v = (stored[list(rows), :, unused:] for stored in layer.stored)
            layer.stored, layer.length = (k, v), layer.length - unused
        self._mask_padding()

    def _mask_padding(self) -> None:
        assert self._padding is not None
        mask_B11T = None
        for layer in self.layers.values():
            assert layer.stored is not None
            if mask_B11T is None and any(self._padding):
                columns_T = torch.arange(layer.stored[0].shape[2], device=layer.stored[0].device)
                padding_B = to_device(self._padding, columns_T.device)
                mask_B11T = (columns_T >= padding_B[:, None])[:, None, None]
            layer.mask_B11T = mask_B11T
