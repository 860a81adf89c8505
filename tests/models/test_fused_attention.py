"""Which of PyTorch's kernels attention can come to."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import current_flash_attention_impl

from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.models import kernels
from torchtitan.models.attention import fused_attention

KEY, CPU = "attention_kernel", torch.device("cpu")


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


def process_state() -> tuple[object, ...]:
    order, impl = torch._C._get_sdp_priority_order(), current_flash_attention_impl()
    return order, impl, torch.compiler.config.cache_key_tag


@pytest.mark.parametrize(
    ("capability", "kernel", "state"),
    [
        (0, "auto", ([1, 2, 0, 3, 4], None, "")),
        (9, "auto", ([1, 2, 0, 3, 4], None, "")),
        (9, "flash", ([1, 3, 2, 0, 4], None, " flash")),
        (9, "flash4", ([1, 3, 2, 0, 4], "FA4", " flash4")),
    ],
)
def test_the_chosen_kernel_holds_for_the_process_until_the_run_ends(
    capability: int, kernel: str, state: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = process_state()
    monkeypatch.setattr(kernels, "_compute_capability", lambda _: capability)
    package = SimpleNamespace(_flash_attn_fwd=None, _flash_attn_bwd=None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package)
    with ExitStack() as cleanup:
        kernels.set_attention_kernel(kernel, device=CPU, cleanup=cleanup)
        assert process_state() == state
    assert process_state() == before


@pytest.mark.parametrize(
    ("capability", "kernel", "value"),
    [(0, "flash", "cpu"), (7, "flash", "7.x"), (10, "flash3", "10.x"), (9, "flash3", "flash_attn")],
)
def test_a_kernel_that_the_machine_lacks_is_refused(
    capability: int, kernel: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = process_state()
    monkeypatch.setattr(kernels, "_compute_capability", lambda _: capability)
    with ExitStack() as cleanup, pytest.raises(ConfigError, match=naming(KEY, kernel)) as error:
        kernels.set_attention_kernel(kernel, device=CPU, cleanup=cleanup)
    assert value in str(error.value)
    assert process_state() == before
