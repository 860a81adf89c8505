"""What a family of models needs, so that it trains, shards and saves like the others.

`LanguageModel` is the contract: the four parts by which every layout divides a model, and what the
trainer calls. `Attends` is the base class of attention, by which context parallelism finds it.
`check_contract` checks a module before anything is trained, and `count` counts its parameters and
FLOPs. Counting the module is right for every family, where a formula of the sizes is right for one;
on the meta device it takes no memory.

docs/extend.md has a family written by this contract, which the tests train.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.models.documents import Documents
from torchtitan.models.init import Constant, Init, Normal
from torchtitan.models.routing import StackedExperts, find_routes
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec, TensorRole

if TYPE_CHECKING:
    from torchtitan.models.decoder import Output, TiedOutput

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Documents | None], torch.Tensor]
"""From q (B, H, S, D), k and v (B, K, S, D) and documents to the output, as q."""


class Attends(nn.Module):
    """A module in which tokens attend to others, only by `attend`.

    Context parallelism replaces `attend` by a function that reaches tokens of other ranks.
    """

    attend: Attend
    width: int
    """Channels of all query heads together, by which attention's FLOPs are counted."""
    window: int | None = None
    """Tokens that a token attends to, itself the last; None: all up to itself."""


def has_window(model: nn.Module) -> bool:
    """Tell whether tokens of `model` attend to a window of those before them."""
    return any(m.window is not None for m in model.modules() if isinstance(m, Attends))


class CastsWeights:
    """Marks a module with weights that computes in the type of its input, casting them itself."""


class LanguageModel(nn.Module):
    """A causal language model of four parts: embedding, blocks, last norm, head.

    A subclass builds the parts, and defines `forward` and `initial`. It is built on the meta
    device, then filled by `initial`; so it has no buffers (`forward` computes whatever else it
    needs), and no parameter under two names, which `to_empty()` would untie.

    Each block is called as `block(x, ...)` and returns the next x (B, S, C); it is the unit that is
    sharded, recomputed and compiled, and may be of any class. Under mixed precision FSDP casts the
    float tensors among its other arguments, also inside tuples, dictionaries and dataclasses; a
    plain object as `Rope` is left alone.
    """

    tok_embeddings: nn.Embedding | None
    layers: nn.ModuleDict
    """The blocks, by their number: "0", "1" and so on, `config.num_layers` of them."""
    norm: nn.Module | None
    output: Output | TiedOutput | None
    """The head. `output(x, labels)` returns the summed loss by its attribute `loss`, which the
    trainer sets; without labels the logits."""
    embedding_is_copy = False
    """Whether the embedding's parameter is another stage's."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        tokens_BS: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: Documents | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the summed loss of the labels, float32, or without them the logits (B, S, V).

        `positions` are those of the tokens, (S) or (B, S): under context parallelism a rank has a
        part of the sequence. `documents` go to each `attend`. Only `ModelSpec.stages` needs a
        module some of whose parts are None, which takes the stream (B, S, C) in the place of
        tokens; and only generation needs a further argument `cache` (`KVCache`).
        """
        raise NotImplementedError

    def initial(self, name: str) -> Init:
        """Say how the parameter of that name starts: `Normal` or `Constant`."""
        raise NotImplementedError

    def keep_only(self, modules: Container[str]) -> None:
        """Become the pipeline stage of these modules: tok_embeddings, layers.0 ..., norm, output.

        A stage with the output of tied embeddings keeps a copy of the embedding, to multiply by.
        """
        if "tok_embeddings" not in modules:
            self.embedding_is_copy = self.config.tie_embeddings and "output" in modules
            if not self.embedding_is_copy:
                self.tok_embeddings = None
        for name in list(self.layers):
            if f"layers.{name}" not in modules:
                del self.layers[name]
        if "norm" not in modules:
            self.norm = None
        if "output" not in modules:
            self.output = None


def check_contract(model: nn.Module, *, spec: ModelSpec) -> None:
    """Compare what a family built, whole and on the meta device, with `LanguageModel` and its spec.

    Raises:
        ConfigError: Names everything that differs from the contract.
    """
    if isinstance(model, LanguageModel):
        mistakes = _wrong_parts(model) + _wrong_parameters(model)
        mistakes += [
            f"its module must have no buffers, got {name}" for name in spec.find_buffers(model)
        ]
    else:
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        mistakes = [f"its module must be a torchtitan.models.contract.LanguageModel, got a {kind}"]
    unknown = {role for role in spec.tensor_plan.values() if role not in get_args(TensorRole)}
    if unknown:
        mistakes.append(
            f"the roles of its tensor_plan must be of {', '.join(get_args(TensorRole))}, got "
            f"{', '.join(sorted(map(str, unknown)))}"
        )
    if shared := spec.hf.find_shared():
        mistakes.append(
            f"its HFFormat must give each parameter one tensor of its own, with a star for the "
            f"layer in both names or in neither, got {', '.join(shared)}"
        )
    rules = [f"'{spec.name}': {m}; docs/extend.md says what a model needs" for m in mistakes]
    if rules:
        raise ConfigError([Violation(("model.name",), rule) for rule in rules])


def _wrong_parts(model: LanguageModel) -> list[str]:
    parts = {
        "tok_embeddings": nn.Embedding,
        "layers": nn.ModuleDict,
        "norm": nn.Module,
        "output": nn.Module,
    }
    mistakes = [
        f"its module must have {part}, an nn.{kind.__name__}, got {getattr(model, part, None)!r}"
        for part, kind in parts.items()
        if not isinstance(getattr(model, part, None), kind)
    ]
    numbers = [str(number) for number in range(model.config.num_layers)]
    if not mistakes and list(model.layers) != numbers:
        mistakes.append(
            f"its layers must be numbered 0 to {len(numbers) - 1} (config.num_layers), got "
            f"{', '.join(model.layers) or 'none'}"
        )
    elif not mistakes:
        assert model.output is not None
        tied = next(model.output.parameters(), None) is None
        if tied != model.config.tie_embeddings:
            mistakes.append(
                f"its output must have a weight of its own unless config.tie_embeddings, got "
                f"tie_embeddings = {model.config.tie_embeddings} and {model.output}"
            )
    try:
        inspect.signature(model.forward).bind("tokens", "positions", "documents", "labels")
    except TypeError as error:
        mistakes.append(f"its forward must take tokens, positions, documents and labels: {error}")
    return mistakes


def _wrong_parameters(model: LanguageModel) -> list[str]:
    mistakes = []
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            mistakes.append(f"a parameter must have one name, got {first} and {name} for the same")
            continue
        try:
            rule: object = model.initial(name)
        except (AssertionError, LookupError, NotImplementedError, ValueError) as error:
            mistakes.append(f"its initial({name!r}) must say how that starts, got {error!r}")
            continue
        if not parameter.ndim:
            mistakes.append(f"a parameter must have a dimension, to be sharded: give {name} one")
        if not isinstance(rule, Normal | Constant):
            mistakes.append(f"its initial({name!r}) must be a Normal or a Constant, got {rule!r}")
    return mistakes


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a model has, and what a token costs."""

    num_parameters: int
    """All of them, a tied matrix once."""
    num_multiplied: int
    """Weights that multiply each token: of experts those that it is sent to."""
    num_head: int
    """Those of them that the output head multiplies by."""
    attention_width: int
    """`Attends.width` of all layers together, but for those with a window."""
    window_widths: Mapping[int, int] = field(default_factory=dict)
    """The same of those with a window, by its tokens."""
    num_idle: int = 0
    """Parameters of experts that a token is not sent to."""
    multiplied_by_layer: tuple[int, ...] = ()
    """`num_multiplied` of each block; none are given where all have as many."""
    num_experts: Mapping[str, int] = field(default_factory=dict)
    """Experts of each layer that has some, by the name of its `Routes`."""

    @property
    def num_active(self) -> int:
        """Parameters without those of experts that a token is not sent to."""
        return self.num_parameters - self.num_idle

    def flops_per_token(self, seq_len: int) -> int:
        """Return the FLOPs of training on one token, forward and backward: 6 N + 12 W S.

        N weights in matrix products, W = L H D: L layers, H heads of width D; S = seq_len; a
        multiply and an add are two. This is the convention of PaLM's appendix B (arXiv:2204.02311),
        the one by which MFU figures are compared: attention counts in full although the causal half
        is never computed, and neither recomputed activations nor norms, softmax and other
        elementwise work count. Where a window is shorter than S, it takes the place of S.
        """
        met = sum(w * min(window, seq_len) for window, w in self.window_widths.items())
        return 6 * self.num_multiplied + 12 * (self.attention_width * seq_len + met)


def count(model: LanguageModel) -> Counts:
    """Count a whole model; the meta device is enough.

    Matrices are the parameters of two dimensions and more, and multiply each token. Those of an
    `nn.Embedding` do not, for they are looked up; where the head has no matrix of its own, the
    embedding's counts all the same, for the head multiplies by it. Of experts those count that a
    token is sent to.
    """
    assert model.tok_embeddings is not None, "a stage is no model"
    assert model.output is not None, "a stage is no model"
    looked_up = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    own = sum(p.numel() for p in model.output.parameters() if p.ndim > 1)
    head = own or model.tok_embeddings.weight.numel()
    widths: Counter[int | None] = Counter()
    for module in model.modules():
        if isinstance(module, Attends):
            widths[module.window] += module.width
    matrices = [p for p in model.parameters() if p.ndim > 1 and id(p) not in looked_up]
    blocks = model.layers.values()
    in_blocks = [sum(p.numel() for p in one.parameters() if p.ndim > 1) for one in blocks]
    idle = [_count_idle(one) for one in blocks]
    return Counts(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_multiplied=sum(p.numel() for p in matrices) - own + head - sum(idle),
        num_head=head,
        attention_width=widths.pop(None, 0),
        window_widths={window: width for window, width in widths.items() if window is not None},
        num_idle=sum(idle),
        multiplied_by_layer=tuple(n - left for n, left in zip(in_blocks, idle, strict=True)),
        num_experts={
            name: len(next(found.experts.parameters()))
            for name, found in find_routes(model).items()
        },
    )


def _count_idle(block: nn.Module) -> int:
    """Return the parameters of a block's experts that a token is not sent to."""
    return sum(
        p.numel() // len(p) * (len(p) - module.num_chosen)
        for module in block.modules()
        if isinstance(module, StackedExperts)
        for p in module.parameters()
    )
