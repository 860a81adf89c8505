"""torch.compile, block by block: each block's many small operators become a few fused ones.

Blocks that share a `forward` are compiled once, however many there are: what is compiled is the
function behind the method, and every block calls it with itself as the first argument. Blocks of
another class, or whose own `forward` was replaced, are compiled by themselves. (The whole model as
one graph takes as many times longer to compile as it has layers, and FSDP, which gathers one
block's weights at a time, would lie inside the graph.) Modules stay the same objects, so parameters
keep their names. Embedding, last norm, head and loss are no blocks and stay as they are.

A block is one graph, and whatever would break it in two is an error. The exceptions are attention
that talks to other ranks or depends on the lengths of documents, and routers with their experts, of
which each gets its own number of tokens: they run uncompiled, between the graphs of what comes
before and after.

Recomputation wraps the compiled block instead of being compiled into it: so blocks that are
recomputed and blocks that are not share one graph, and a recomputed block keeps only its input.
Alternatively the compiler gets a memory budget and chooses itself what to recompute.

A graph is valid for one shape. Another batch or sequence length, or a forward without gradients, as
in evaluation, compiles one more; a job has two or three of them. Beyond eight torch assumes a
mistake and raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.models.interface import AttentionModule, MoELayer
from torchtitan.parallel.settings import CompileConfig

INDUCTOR = "inductor"


def check_backend(settings: CompileConfig, *, is_installed: bool) -> None:
    """Check the backend's name; `is_installed`: whether this machine must have it."""
    if not settings.enable:
        return
    # listing the backends takes a second: only where one is used
    known = torch.compiler.list_backends(exclude_tags=None)
    guess = did_you_mean(settings.backend, known)
    if settings.backend not in known and (is_installed or guess):
        others = ", ".join(sorted({*torch.compiler.list_backends()} - {INDUCTOR}))
        raise ConfigError.at(
            "compile.backend",
            f"must be inductor, another one that is installed ({others}), or aot_eager or eager, "
            f"which generate no code; got '{settings.backend}'{guess}",
        )


def apply_compile(
    model: nn.Module,
    *,
    backend: str,
    memory_budget: float,
    opaque_attention: bool,
    sequence_comes_async: bool,
) -> None:
    """Compile the blocks of `model` in place; the work is done when the first batch comes.

    `memory_budget`: the fraction of what a graph would save for backward that it may save; the rest
    is recomputed. `opaque_attention`: attention cannot be compiled. `sequence_comes_async`: the
    embedding's output may still be on its way from other ranks.
    """
    has_experts = _leave_out_routes(model)
    compiled: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
    for block in model.layers.values():
        forward = block.forward
        is_own_method = isinstance(forward, MethodType) and forward.__self__ is block
        shared = forward.__func__ if is_own_method else forward
        if shared not in compiled:
            graphs: Any = torch.compile(
                shared,
                backend=backend,
                fullgraph=not (opaque_attention or has_experts),
                dynamic=False,
            )
            budgeted = graphs if memory_budget == 1.0 else _within(memory_budget, graphs)
            compiled[shared] = budgeted
        block.forward = MethodType(compiled[shared], block) if is_own_method else compiled[shared]
    for module in model.modules():
        if isinstance(module, AttentionModule) and opaque_attention:
            module.attend = torch.compiler.disable(
                module.attend, reason="it talks to other ranks, or depends on lengths"
            )
    if sequence_comes_async and model.tok_embeddings is not None:
        # a compiled block would wait for such an input, and drop its history
        model.tok_embeddings.register_forward_hook(_arrived)


def _leave_out_routes(model: nn.Module) -> bool:
    """Leave routers and experts out of compiled graphs, in place; tell whether there are any."""
    disabled: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
    for module in model.modules():
        if isinstance(module, MoELayer):
            assert isinstance(module.route, MethodType)
            shared = module.route.__func__
            if shared not in disabled:  # one for all layers: a graph holds for that alone
                disabled[shared] = torch.compiler.disable(
                    shared, reason="each expert has its own number of tokens"
                )
            module.route = MethodType(disabled[shared], module)
    return bool(disabled)


def _within(memory_budget: float, compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Set the memory budget while `compiled` runs; it is read when a graph is made."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with torch._functorch.config.patch(activation_memory_budget=memory_budget):
            return compiled(*args, **kwargs)

    return forward


def _arrived(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Wait for a tensor: a copy of it is a plain one, with its history."""
    return output.clone()
