"""Each kernel that the trainer selects by device and dtype, compared with float64 on the CPU.

    python -m scripts.benchmarks.kernels --out errors.json

Every check computes outputs and gradients twice from the same inputs: on this machine's device by
the trainer's own function, and by a plain formula in float64. An error is |ours - exact| / |exact|,
by the norm of all elements. It may be a few roundings of the dtype (`BOUNDS`), since sums are
float32 or wider. Initial weights must have equal bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan.base.device import device_type
from torchtitan.models.attention import causal_attention
from torchtitan.models.init import fill_normal, make_key
from torchtitan.models.interface import Documents
from torchtitan.models.moe import combine, invert, multiply_grouped, reorder
from torchtitan.optim.loss import IGNORE_INDEX, build_loss
from torchtitan.parallel.expert import why_not_grouped

BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Largest error. bfloat16 keeps 8 bits, so one rounding is 2e-3 on average; float32 keeps 24."""
SIZES = {"cuda": (2, 16, 4, 1024, 128), "cpu": (2, 4, 2, 96, 16)}
"""Batch, query heads, key/value heads, tokens, head width."""

Results = Sequence[Tensor]
Check = Callable[[torch.dtype], Iterator[tuple[Results, Results]]]


def measure_errors() -> dict[str, dict[str, float]]:
    """Return the largest error of each check by name, with its bound."""
    torch.manual_seed(0)
    found = {}
    for name, check in checks().items():
        for dtype, bound in BOUNDS.items():
            if name.startswith("experts") and why_not_grouped([], device_type=KIND, dtype=dtype):
                continue
            errors = [
                _error(ours, exact)
                for pair in check(dtype)
                for ours, exact in zip(*pair, strict=True)
            ]
            key = f"{name}, {str(dtype).removeprefix('torch.')}"
            found[key] = {"error": max(errors, key=_nan_is_largest), "bound": bound}
    found["initial weights"] = {"error": _differing_bits(), "bound": 0.0}
    return found


def checks() -> dict[str, Check]:
    """Return all checks by name."""
    documents = _documents()
    return {
        "attention": partial(_attention, documents=None, window=None),
        "window": partial(_attention, documents=None, window=40),
        "documents": partial(_attention, documents=documents, window=None),
        "documents and window": partial(_attention, documents=documents, window=40),
        "experts": partial(_experts, rows=(32, 64, 16, 48)),
        "experts, some without rows": partial(_experts, rows=(0, 96, 0, 64)),
        "experts, one with all rows": partial(_experts, rows=(0, 0, 160, 0)),
        "rows of experts": partial(_rows, tokens=96, dim=64),
        "rows of experts, many tokens": partial(_rows, tokens=70_000, dim=16),
        "norm": _norm,
        "loss": _loss,
    }


KIND = device_type()
DEVICE = torch.device(KIND)


def _documents() -> Documents:
    batch, _, _, tokens, _ = SIZES[KIND]
    cuts = (tokens // 2, 1, tokens // 8)
    return Documents(((*cuts, tokens - sum(cuts)),) + ((tokens,),) * (batch - 1))


def _draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def _run(function: Callable[..., Tensor], inputs: Results, grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def _both(
    ours: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Results, grad: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    found = _run(ours, [x.to(DEVICE) for x in inputs], grad.to(DEVICE))
    return found, _run(exact, [x.double() for x in inputs], grad.double())


def _error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().cpu().double() - exact.detach()).norm() / exact.detach().norm())


def _nan_is_largest(error: float) -> float:
    return float("inf") if error != error else error


def _exact_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    documents: Documents | None,
    window: int | None,
) -> Tensor:
    batch, heads, tokens, width = q_BHSD.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_BKSD, v_BKSD))
    place_S = torch.arange(tokens)
    gap_ST = place_S[:, None] - place_S
    seen_ST = (gap_ST >= 0) & (gap_ST < (window or tokens))
    seen_BST = seen_ST.expand(batch, -1, -1)
    if documents is not None:
        number_BS = torch.stack(
            [
                torch.arange(len(row)).repeat_interleave(torch.tensor(row))
                for row in documents.lengths
            ]
        )
        seen_BST = seen_BST & (number_BS[:, :, None] == number_BS[:, None])
    scores = q_BHSD @ k.mT / width**0.5
    return scores.masked_fill(~seen_BST[:, None], -torch.inf).softmax(-1) @ v


def _qkv(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    batch, heads, kv_heads, tokens, width = SIZES[KIND]
    shapes = [(batch, num, tokens, width) for num in (heads, kv_heads, kv_heads, heads)]
    *inputs, grad = (_draw(*shape, dtype=dtype) for shape in shapes)
    return inputs, grad


def _attention(
    dtype: torch.dtype, *, documents: Documents | None, window: int | None
) -> Iterator[tuple[Results, Results]]:
    ours = partial(causal_attention, documents=documents, window=window)
    exact = partial(_exact_attention, documents=documents, window=window)
    yield _both(ours, exact, *_qkv(dtype))


def _experts(dtype: torch.dtype, *, rows: Sequence[int]) -> Iterator[tuple[Results, Results]]:
    num, dim, hidden = len(rows), 64, 128
    shapes = (sum(rows), dim), (num, hidden, dim), (num, dim, hidden), (num, hidden, dim)
    inputs = [_draw(*shape, dtype=dtype) / shape[-1] ** 0.5 for shape in shapes]

    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        return multiply_grouped(x, torch.tensor(rows, device=x.device), weights)

    def exact(x: Tensor, *weights: Tensor) -> Tensor:
        parts = zip(x.split(list(rows)), *weights, strict=True)
        return torch.cat([(F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT for x, w1, w2, w3 in parts])

    yield _both(ours, exact, inputs, _draw(sum(rows), dim, dtype=dtype))


def _rows(dtype: torch.dtype, *, tokens: int, dim: int) -> Iterator[tuple[Results, Results]]:
    """Rows that are sorted, changed, and added by weight: a product of `tokens` small matrices, of
    which some kernels take 65,535."""
    num_chosen = 4
    order_N = torch.randperm(tokens * num_chosen)
    inputs = [_draw(tokens, dim, dtype=dtype), _draw(len(order_N), dim, dtype=dtype)]
    weights_TK = torch.rand(tokens, num_chosen)

    def ours(x_TC: Tensor, y_NC: Tensor, weights_TK: Tensor) -> Tensor:
        order = order_N.to(x_TC.device)
        back = invert(order)
        return combine(reorder(x_TC, order, back, num_chosen) * y_NC, weights_TK, order, back)

    def exact(x_TC: Tensor, y_NC: Tensor, weights_TK: Tensor) -> Tensor:
        y_TKC = y_NC[order_N.argsort()].view(tokens, num_chosen, dim)
        return (x_TC[:, None] * y_TKC * weights_TK[..., None]).sum(1)

    yield _both(ours, exact, [*inputs, weights_TK], _draw(tokens, dim, dtype=dtype))


def _norm(dtype: torch.dtype) -> Iterator[tuple[Results, Results]]:
    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, 1e-5)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    inputs = _draw(64, 512, dtype=dtype), _draw(512, dtype=dtype)
    yield _both(ours, exact, inputs, _draw(64, 512, dtype=dtype))


def _loss(dtype: torch.dtype) -> Iterator[tuple[Results, Results]]:
    tokens, dim, vocab = (2048, 512, 50_000) if KIND == "cuda" else (128, 32, 2000)
    labels = torch.randint(0, vocab, (1, tokens))
    labels[:, ::5] = IGNORE_INDEX
    inputs = _draw(1, tokens, dim, dtype=dtype), _draw(vocab, dim, dtype=dtype) / 8

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return build_loss(None, num_chunks=4)(x, weight, labels.to(DEVICE))

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.mT).flatten(0, 1), labels.flatten(), reduction="sum")

    yield _both(ours, exact, inputs, torch.tensor(1.0))


def _differing_bits() -> float:
    """Return the share of elements that differ between this device and the CPU."""
    shape = 1000, 1001
    offsets = [torch.arange(shape[0]) * shape[1], torch.arange(shape[1])]
    drawn = []
    for device in (DEVICE, torch.device("cpu")):
        out = torch.empty(shape, device=device)
        fill_normal(out, std=0.02, key=make_key("norm.weight", seed=7), offsets=offsets)
        drawn.append(out.cpu())
    return float((drawn[0] != drawn[1]).double().mean())


def main(argv: Sequence[str]) -> int:
    """Print all errors, or write them to --out. Return 1 if a printed one is above its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the errors as JSON")
    args = parser.parse_args(argv)
    found = measure_errors()
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        return 0  # its reader tells which are above
    for name, row in found.items():
        mark = "" if is_good(row) else "  ABOVE"
        sys.stdout.write(f"{row['error']:.1e} of {row['bound']:.0e}  {name}{mark}\n")
    return 0 if all(map(is_good, found.values())) else 1


def is_good(row: Mapping[str, float]) -> bool:
    """Return whether an error is within its bound. NaN is not."""
    return row["error"] <= row["bound"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
