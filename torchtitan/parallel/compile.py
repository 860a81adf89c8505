"""torch.compile, block by block: each block's many small operators become a few fused ones.

Blocks of a class are all alike, so they are compiled once, however many there are: what is compiled
is the class's `forward`, and every block calls that with itself as the first argument. (The whole
model as one graph compiles for as many times longer as it has layers, and FSDP, which gathers one
block's weights at a time, would lie inside of the graph.) Modules stay the same objects, so
parameters keep their names. What is not a block, embedding, last norm, head and loss, stays as it
is.

A block is one graph, and whatever would break it in two is an error, but for attention that talks
to other ranks or goes by the lengths of documents: the compiler looks into neither. Such attention
runs as it would without the compiler, between the graphs of what stands before and behind it.

Recomputation wraps the compiled block, rather than being compiled into it: so blocks that are
recomputed and blocks that are not share one graph, and a recomputed one keeps its input alone. Or
the compiler itself is given a budget of memory, and finds what of a block to recompute for it.

A graph is good for one shape: the kernels know all lengths. Another batch or sequence length, or a
forward without gradients, as in evaluation, compiles one more; a job has two or three of them. Past
eight torch takes it for a mistake and raises.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.models.contract import Attends
from torchtitan.parallel.settings import CompileConfig

INDUCTOR = "inductor"


def check_backend(settings: CompileConfig, *, is_installed: bool) -> None:
    """Check the compiler's name; `is_installed`: whether it must be one of this machine's.

    Raises:
        ConfigError: There is none of that name here, or it is another one misspelt.
    """
    if not settings.enable:
        return
    # loading the compilers takes a second, which other jobs need not spend
    known = torch.compiler.list_backends(exclude_tags=None)
    guess = did_you_mean(settings.backend, known)
    if settings.backend not in known and (is_installed or guess):
        others = ", ".join(sorted({*torch.compiler.list_backends()} - {INDUCTOR}))
        raise ConfigError(
            f"[compile] backend must be inductor, another one that is installed ({others}), or "
            f"aot_eager or eager, which make no code; got '{settings.backend}'{guess}"
        )


def check_compile(settings: CompileConfig, *, device_type: str) -> None:
    """Check that this machine has something to compile with.

    Raises:
        ConfigError: The backend is unknown, or needs a C++ compiler that is not there.
    """
    check_backend(settings, is_installed=True)
    if not settings.enable:
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if settings.backend == INDUCTOR and device_type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                "[compile] enable: inductor writes C++ for CPUs and finds no compiler for it; "
                "install one (g++), or name yours in the environment variable CXX, or write "
                "compile.enable = false"
            ) from error


def apply_compile(
    model: nn.Module,
    *,
    backend: str,
    memory_budget: float,
    opaque_attention: bool,
    sequence_comes_async: bool,
) -> None:
    """Compile the blocks of `model` in place; code is made when the first batch comes.

    `memory_budget`: the part to keep of what a graph keeps by itself for backward; the rest is
    recomputed. `opaque_attention`: the compiler cannot look into attention. `sequence_comes_async`:
    the embedding hands on what may still be on its way from other ranks.
    """
    forwards: dict[type, Callable[..., Tensor]] = {}
    for block in model.layers.values():
        if type(block) not in forwards:
            compiled: Any = torch.compile(
                type(block).forward, backend=backend, fullgraph=not opaque_attention, dynamic=False
            )
            budgeted = compiled if memory_budget == 1.0 else _within(memory_budget, compiled)
            forwards[type(block)] = budgeted
        block.forward = MethodType(forwards[type(block)], block)
    for module in model.modules():
        if isinstance(module, Attends) and opaque_attention:
            module.attend = torch.compiler.disable(
                module.attend, reason="it talks to other ranks, or goes by lengths"
            )
    if sequence_comes_async and model.tok_embeddings is not None:
        # a compiled block would wait for such an input, and lose the way back to the embedding
        model.tok_embeddings.register_forward_hook(_arrived)


def _within(memory_budget: float, compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let what is compiled inside keep to a budget; it is read when a graph is made."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with torch._functorch.config.patch(activation_memory_budget=memory_budget):
            return compiled(*args, **kwargs)

    return forward


def _arrived(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Wait for a tensor: a copy of it is a plain one, with its history."""
    return output.clone()
