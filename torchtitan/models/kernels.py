"""The fused kernels of attention: their choice, and those that return the log-sum-exp of scores.

PyTorch's public attention does not return it. It is what a softmax over more than one call's keys
needs: parts of a sequence (`parallel/context/attention.py`) or a sink. Backward takes the output
and log-sum-exp of the full softmax.

The choice holds for the process: other versions of flash attention replace the CUDA kernels of
torch's operators, also of those called here. Read in torch 2.11 to 2.15.

Shapes: B batch, H query heads, K key/value heads, S queries, T keys, D head width.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from torchtitan.base.errors import ConfigError

logger = logging.getLogger(__name__)
Band = tuple[int, int]
"""Lowest and highest index of a key, relative to the index of a query that attends to it."""
aten = torch.ops.aten
LSE_ALIGNMENT = 32
"""The CUDA kernel for float32 pads its log-sum-exp to a multiple of this many rows."""
MASK_ALIGNMENT = 16
"""It needs masks whose rows are a multiple of this many elements apart."""
CAPABILITIES = {"flash": (8, 12), "flash3": (9, 9), "flash4": (9, 10)}
"""First and last major compute capability of the GPUs that run a `training.attention_kernel`."""
FLASH_FIRST = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def set_attention_kernel(kernel: str, *, device: torch.device, cleanup: ExitStack) -> None:
    """Let attention of this process prefer `training.attention_kernel`, until `cleanup` closes.

    "auto" keeps torch's order. Where deterministic operators are required, torch does not choose
    cuDNN's kernel, and asks the others for a deterministic backward. Raises ConfigError if the GPU
    or the installed packages lack the kernel.
    """
    key, major = "training.attention_kernel", _compute_capability(device)
    first, last = CAPABILITIES.get(kernel, (0, major))
    if not first <= major <= last:
        rule = f"{kernel!r} needs a GPU of compute capability {first}.x to {last}.x, got {device}"
        raise ConfigError.at(key, f"{rule} ({major}.x)" if major else rule)
    if major == 0:
        return
    # torch overwrites the order of its kernels when it chooses one for the first time
    x_BHSD = torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16, device=device)
    torch._fused_sdp_choice(x_BHSD, x_BHSD, x_BHSD)
    if kernel != "auto":
        cleanup.enter_context(sdpa_kernel(FLASH_FIRST, set_priority=True))
        # compiled graphs contain the chosen kernel, which the key of torch's cache lacks
        tag = f"{torch.compiler.config.cache_key_tag} {kernel}"
        cleanup.enter_context(torch.compiler.config.patch(cache_key_tag=tag))
    if kernel in ("flash3", "flash4"):
        try:
            activate_flash_attention_impl("FA3" if kernel == "flash3" else "FA4")
        except (ImportError, RuntimeError) as error:
            rule = f"{kernel!r} needs a package that this Python cannot load: {error}"
            raise ConfigError.at(key, rule) from error
        cleanup.callback(restore_flash_attention_impl)
    names = [SDPBackend(number).name for number in torch._C._get_sdp_priority_order()[:2]]
    logger.info("Preferred kernels of attention (%s): %s", kernel, ", ".join(names))


def _compute_capability(device: torch.device) -> int:
    """Return the major number. 0: no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def attend(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, causal: bool, band: Band | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output, like q, and the log-sum-exp of the scores, float32 (B, H, S)."""
    mask_BHST = None if band is None else _mask(q_BHSD, k_BKTD, band)
    if _is_on_cpu(q_BHSD):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSD, k_BKTD, v_BKTD, 0.0, causal, attn_mask=mask_BHST
        )
    if q_BHSD.dtype == torch.float32 or mask_BHST is not None:
        k_BHTD, v_BHTD = _repeat_heads(k_BKTD, like=q_BHSD), _repeat_heads(v_BKTD, like=q_BHSD)
        out_BHSD, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q_BHSD, k_BHTD, v_BHTD, mask_BHST, True, 0.0, causal
        )
        return out_BHSD, lse[..., : q_BHSD.shape[2]]
    out_BHSD, lse_BHS, *_ = aten._scaled_dot_product_flash_attention(
        q_BHSD, k_BKTD, v_BKTD, 0.0, causal
    )
    return out_BHSD, lse_BHS


def attend_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    causal: bool,
    band: Band | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's gradients of q, k and v from the merged output and log-sum-exp."""
    grad, out, lse = grad_BHSD.contiguous(), out_BHSD.contiguous(), lse_BHS.contiguous()
    mask_BHST = None if band is None else _mask(q_BHSD, k_BKTD, band)
    if _is_on_cpu(q_BHSD):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q_BHSD, k_BKTD, v_BKTD, out, lse, 0.0, causal, attn_mask=mask_BHST
        )
    # the 16-bit kernel groups heads too, but rounds the sums of their gradients to 16 bits
    k, v = _repeat_heads(k_BKTD, like=q_BHSD), _repeat_heads(v_BKTD, like=q_BHSD)
    unused = torch.zeros((), dtype=torch.int64, device=q_BHSD.device)  # dropout state
    if q_BHSD.dtype == torch.float32 or mask_BHST is not None:
        # padding rows get an infinite sum, so that their probabilities are 0
        lse = F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=torch.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q_BHSD, k, v, mask_BHST, out, lse, unused, unused, 0.0,
            [True, True, True, False], causal,
        )  # fmt: skip
    else:
        lengths = q_BHSD.shape[2], k.shape[2]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q_BHSD, k, v, out, lse, None, None, *lengths, 0.0, causal, unused, unused
        )
    return dq, _sum_heads(dk, like=k_BKTD), _sum_heads(dv, like=v_BKTD)


def sinks_backward(
    sinks_H: Tensor, grad_BHSD: Tensor, *, out_BHSD: Tensor, lse_BHS: Tensor
) -> Tensor:
    """Return the gradient of scores with the value 0, one per head, from the full softmax."""
    share_BHS = (sinks_H.float()[:, None] - lse_BHS).exp()
    return -(share_BHS * (grad_BHSD * out_BHSD).sum(-1)).sum((0, 2)).to(sinks_H.dtype)


class _SinkAttention(torch.autograd.Function):
    """See `attend_with_sinks`."""

    @staticmethod
    def forward(
        ctx: Any, q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, sinks_H: Tensor, *where: Any
    ) -> Tensor:
        causal, band = ctx.where = where
        out_BHSD, lse_BHS = attend(q_BHSD, k_BKTD, v_BKTD, causal=causal, band=band)
        with_sinks_BHS = torch.logaddexp(lse_BHS, sinks_H.to(lse_BHS.dtype)[:, None])
        out_BHSD = out_BHSD * (lse_BHS - with_sinks_BHS).exp()[..., None].to(out_BHSD.dtype)
        ctx.save_for_backward(q_BHSD, k_BKTD, v_BKTD, sinks_H, out_BHSD, with_sinks_BHS)
        return out_BHSD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSD, k_BKTD, v_BKTD, sinks_H, out_BHSD, lse_BHS = ctx.saved_tensors
        causal, band = ctx.where
        whole = {"out_BHSD": out_BHSD, "lse_BHS": lse_BHS}
        dq, dk, dv = attend_backward(
            grads[0], q_BHSD, k_BKTD, v_BKTD, **whole, causal=causal, band=band
        )
        dsinks_H = sinks_backward(sinks_H, grads[0], **whole)
        return dq, dk.to(k_BKTD.dtype), dv.to(v_BKTD.dtype), dsinks_H, None, None


def attend_with_sinks(
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    sinks_H: Tensor,
    *,
    causal: bool,
    band: Band | None,
) -> Tensor:
    """Attend by a softmax whose sum also has a sink: a score of each head, with the value 0."""
    out_BHSD: Tensor = _SinkAttention.apply(q_BHSD, k_BKTD, v_BKTD, sinks_H, causal, band)
    return out_BHSD


def _mask(q_BHSD: Tensor, k_BKTD: Tensor, band: Band) -> Tensor:
    """Return 0 in the band and -inf outside, one (S, T) tensor for all sequences and heads."""
    num_keys = k_BKTD.shape[2]
    padded = num_keys + -num_keys % MASK_ALIGNMENT
    hidden_ST = q_BHSD.new_full((q_BHSD.shape[2], padded), -torch.inf)
    mask_ST = hidden_ST.tril(band[0] - 1) + hidden_ST.triu(band[1] + 1)
    return mask_ST[:, :num_keys].expand(*q_BHSD.shape[:2], -1, -1)


def _is_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _repeat_heads(x_BKTD: Tensor, *, like: Tensor) -> Tensor:
    """Repeat each key/value head for its query heads, on this device only."""
    return x_BKTD.repeat_interleave(like.shape[1] // x_BKTD.shape[1], dim=1)


def _sum_heads(grad_BHTD: Tensor, *, like: Tensor) -> Tensor:
    """Sum the gradients of each key/value head's copies, in float32."""
    return grad_BHTD.unflatten(1, (like.shape[1], -1)).sum(2, dtype=torch.float32)
