"""Which of PyTorch's kernels attention can come to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtitan.models.attention import fused_attention


@pytest.mark.promise("no-square")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_never_come_to_the_kernel_that_holds_scores(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA float32 is for the memory-efficient kernel, which takes no groups."""
    seen: list[tuple[int, bool]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **_: object) -> Tensor:
        assert k.shape == v.shape
        seen.append((k.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        q = torch.empty(1, 8, 6, 4, device=device, dtype=dtype)
        k = torch.empty(1, 2, 6, 4, device=device, dtype=dtype)
        fused_attention(q, k, k, is_causal=True)
    copied = device == "cuda" and dtype == torch.float32
    assert seen == [(8, False) if copied else (2, True)]
