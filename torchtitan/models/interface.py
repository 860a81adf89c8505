"""The base classes of every model, which the rest of the library works with.

`LanguageModel` is the contract of a model family: the four parts that every layout divides, and the
methods that the trainer calls. Other base classes mark the modules that a layout changes:
`AttentionModule` for context parallelism, and `MoELayer` with its `RouterModule` and
`GroupedExperts` for expert parallelism and load balancing. They are changed only by replacing an
attribute that holds a function, so that model code knows nothing of other ranks.

`count` counts parameters and FLOPs from the module itself, because a formula of the sizes would be
right for one family only. `ModelSpec` (`spec.py`) describes a family; docs/extend.md writes one.

Shapes: B batch, S sequence, C = dim, V vocabulary, H query heads, K key/value heads or experts per
token, D head width, E experts, N rows sorted by expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.base.errors import ConfigError
from torchtitan.base.patterns import check_pattern, matches
from torchtitan.models.init import Init
from torchtitan.models.sizes import DecoderConfig

TIED = "tok_embeddings.weight"
"""The parameter that a tied output multiplies by."""
T = TypeVar("T")


class Documents:
    """Lengths of the documents that are packed end to end in each sequence of a batch.

    Lengths take one number per document, where a mask would take S x S, and they are what
    variable-length kernels need. They stay on the host, so that planning never waits for a device.

    This is a plain class because FSDP traverses the tuples and dataclasses among a block's
    arguments element by element.

    `lengths` has a row per sequence; all rows have equal sums.
    """

    requires_grad, grad_fn = False, None  # torch 2.11 reads these of every input of a stage

    def __init__(self, lengths: tuple[tuple[int, ...], ...]) -> None:
        self.lengths = lengths
        self._cache: dict[Hashable, Any] = {}

    @classmethod
    def from_flat(cls, lengths: Tensor, *, seq_len: int) -> Documents:
        """Split the lengths of all documents of a batch, int64, into rows of `seq_len` tokens."""
        rows: list[list[int]] = []
        remaining = 0
        for length in lengths.tolist():
            assert length > 0, "a document has at least one token"
            if not remaining:
                rows.append([])
                remaining = seq_len
            rows[-1].append(length)
            remaining -= length
            assert remaining >= 0, "a document ends within its sequence"
        assert not remaining, "the last document ends with its sequence"
        return cls(tuple(map(tuple, rows)))

    def __getitem__(self, rows: slice) -> Documents:
        """Return the documents of some of the sequences."""
        return Documents(self.lengths[rows])

    def bounds(self, row: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of each document of one sequence."""
        return pairwise(accumulate(self.lengths[row], initial=0))

    def positions(self) -> Tensor:
        """Return the position of each token in its document, int64 (B, S)."""
        return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in self.lengths])

    def cached(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return `compute()`, which runs once per key: all layers need the same result."""
        if key not in self._cache:
            self._cache[key] = compute()
        result: T = self._cache[key]
        return result


Attend = Callable[..., Tensor]
"""From q (B, H, S, D), k and v (B, K, S, D), documents or None, and sinks (H) of an attention that
has them, to the output, shaped like q."""


class AttentionModule(nn.Module):
    """Base class of attention. Tokens may meet only in `attend`.

    Context parallelism replaces `attend` by a function that also reaches tokens of other ranks.
    """

    attend: Attend
    width: int
    """Total width of all query heads. It determines the FLOPs of attention."""
    window: int | None = None
    """Number of tokens that a token attends to, itself included. None: all up to itself."""


def has_window(model: nn.Module) -> bool:
    """Return whether any layer uses sliding-window attention."""
    return any(m.window is not None for m in model.modules() if isinstance(m, AttentionModule))


Compute = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]
"""From rows (N, C), the number of rows per expert (E), and the stacked weights to rows (N, C)."""
Exchange = Callable[[Compute, Tensor, Tensor, Sequence[Tensor]], Tensor]
"""Calls the `Compute` that it gets first on the remaining arguments, where the experts are."""


def compute_locally(
    compute: Compute, x_NC: Tensor, counts_E: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    """Call `compute` on this rank, which has all experts: the default `Exchange`.

    `x_NC` are rows sorted by expert, `counts_E` rows per expert, `weights` matrices stacked along
    the first dimension.
    """
    return compute(x_NC, counts_E, weights)


class GroupedExperts(nn.Module):
    """Base class of a layer's experts, whose parameters are stacked along the first dimension.

    The shapes inside depend on the number of tokens per expert, so this module is excluded from
    compiled graphs. It calls `exchange(compute, x, counts, weights)` for the products. Expert
    parallelism replaces `exchange` by a function that sends rows to the ranks of their experts.
    """

    num_chosen: int
    """Number of experts that each token is sent to."""
    compute: Compute

    def __init__(self) -> None:
        super().__init__()
        self.exchange: Exchange = compute_locally


class RouterModule(nn.Module):
    """Base class of a router. It selects experts only by calling `choose`.

    Activation checkpointing replaces `choose` by a function that repeats the choice when a block
    is recomputed. `optim/balance.py` sets the other two, which apply in training only.
    """

    choose: Callable[[Tensor, Tensor | None], Tensor]
    """From scores (B, S, E) without gradients, and the experts' bias, to experts (B, S, K), int64.
    Calls `on_choice`."""
    on_choice: Callable[[Tensor, Tensor], None] | None
    """Called once per forward with scores and experts, not again when a block is recomputed."""
    extra_loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    """From logits and scores (B, S, E) and the chosen experts to a scalar that is added to the
    loss of the model. None: no such loss."""


class MoELayer(nn.Module):
    """Base class of a mixture of experts, which sends tokens (B, S, C) to `experts` by `route`.

    Each rank routes its own tokens. With tensor parallelism but no sequence parallelism, where
    several ranks hold the same tokens, `route` is replaced by a function that divides them.
    """

    router: RouterModule
    experts: GroupedExperts
    shared_experts: nn.Module | None
    """Receives every token."""
    route: Callable[[Tensor], Tensor]
    expert_bias: nn.Parameter | None
    """Added to the scores when experts are chosen, float32 (E,). It receives no gradient:
    `optim/balance.py` updates it to balance the load. It is replicated on every rank."""


def find_moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return all mixtures of experts by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def router_biases(model: nn.Module) -> list[nn.Parameter]:
    """Return the `expert_bias` of every layer that has one: state, not trained by gradients."""
    layers = find_moe_layers(model).values()
    return [layer.expert_bias for layer in layers if layer.expert_bias is not None]


class CastsWeights:
    """Marks a module that computes in the dtype of its input and casts its weights itself."""


HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From the head's input (B, S, C), its weight (V, C) and labels (B, S) to the summed loss."""


class Output(nn.Linear, CastsWeights):
    """The output head. It returns logits or, given labels, the summed loss.

    The loss is computed here, so that the logits of a long sequence are never in memory at once.
    """

    loss: HeadLoss
    """Must be set before a loss is computed; `build_model_and_execution` does so for training."""

    def forward(self, x_BSC: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        """Return the logits (B, S, V), or the summed loss, a scalar in float32."""
        if labels_BS is None:
            return F.linear(x_BSC, self.weight.to(x_BSC.dtype))
        return self.loss(x_BSC, self.weight, labels_BS)


class TiedOutput(nn.Module):
    """An output head that has no weight and multiplies by the embedding's."""

    loss: HeadLoss
    """Must be set before a loss is computed; `build_model_and_execution` does so for training."""

    def forward(self, x_BSC: Tensor, weight_VC: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        """Return the logits (B, S, V), or the summed loss, a scalar in float32."""
        if labels_BS is None:
            return F.linear(x_BSC, weight_VC.to(x_BSC.dtype))
        return self.loss(x_BSC, weight_VC, labels_BS)


class LanguageModel(nn.Module):
    """Base class of a causal language model: embedding, blocks, final norm and output head.

    A subclass builds these four parts and defines `forward` and `initial`. It is built on the meta
    device and filled by `initial`. So it has no buffers (`forward` computes what else it needs)
    and no parameter under two names, which `to_empty()` would untie.

    Each block is called as `block(x, ...)` and returns the next x (B, S, C). Blocks are the units
    of sharding, recomputation and compilation, and may be of any class. With mixed precision, FSDP
    casts the float tensors among the other arguments of a block, also in tuples, dictionaries and
    dataclasses, but not in plain objects such as `Rope`.
    """

    tok_embeddings: nn.Embedding | None
    layers: nn.ModuleDict
    """The blocks by number, "0" to `config.num_layers - 1`. A pipeline stage has some of them."""
    norm: nn.Module | None
    output: Output | TiedOutput | None
    embedding_is_copy = False
    """Whether this stage's embedding is a copy of another stage's parameter, for a tied output."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return the summed loss of the labels, float32, or without labels the logits (B, S, V).

        With `ModelSpec.stages` a model also runs as a pipeline stage: its other parts are None, and
        a stage without the embedding takes the residual stream (B, S, C) as `tokens_BS`. Generation
        needs one more argument, `cache` (`KVCache`).

        Args:
            tokens_BS: Token ids.
            positions: Positions of the tokens, (S) or (B, S). With context parallelism a rank has
                a part of each sequence.
            documents: Passed to each `attend`, to keep documents apart.
            labels: Next tokens (B, S), -100 where no loss is due.
        """
        raise NotImplementedError

    def head(self, x_BSC: Tensor, labels_BS: Tensor | None) -> Tensor:
        """Return the head's logits or loss, from the output of the last norm."""
        assert self.output is not None
        if isinstance(self.output, TiedOutput):
            assert self.tok_embeddings is not None
            return self.output(x_BSC, self.tok_embeddings.weight, labels_BS)
        return self.output(x_BSC, labels_BS)

    def initial(self, name: str) -> Init:
        """Return how a parameter is initialized: `Normal` or `Constant`."""
        raise NotImplementedError

    def prune_to_stage(self, modules: Container[str]) -> None:
        """Keep only the parts of a pipeline stage, such as tok_embeddings, layers.0, norm.

        With tied embeddings the last stage keeps the embedding, as a copy to multiply by.
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


class HasParameters(Protocol):
    """A model, or the parts of it that a rank holds."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters."""
        ...


class ModelParts:
    """The parts of one model that this rank holds: the model itself, or its pipeline stages.

    Every part names its parameters as the full model does. So optimizer, checkpoints and
    initialization see one flat set of parameters in every layout. If tied embeddings are on two
    stages, the first stage owns the parameter, and the last stage's copy (`tied_copy`) is not
    listed, so that it is updated, saved and counted once.
    """

    def __init__(self, parts: Sequence[LanguageModel]) -> None:
        self._parts = tuple(parts)

    def __iter__(self) -> Iterator[LanguageModel]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names, as in the full model, and parameters."""
        for part in self._parts:
            for name, parameter in part.named_parameters():
                if not (part.embedding_is_copy and name == TIED):
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """This rank's copy of the embedding for a tied output, if it has one."""
        copies = [part.tok_embeddings for part in self._parts if part.embedding_is_copy]
        return copies[0].weight if copies and copies[0] is not None else None

    @property
    def tied_source(self) -> nn.Parameter | None:
        """The embedding's parameter, if it is on this rank."""
        return dict(self.named_parameters()).get(TIED)


@dataclass(frozen=True, kw_only=True)
class TrainableParams:
    """Selects the parameters to train, by name. The other parameters keep their values exactly.

    A frozen parameter has `requires_grad = False`, and this is the only mark: autograd computes no
    gradient for it, and the optimizer holds no state for it.
    """

    only: tuple[str, ...] = ("*",)
    """Shell patterns of names to train."""
    frozen: tuple[str, ...] = ()
    """Shell patterns of names to freeze. They take precedence over `only`."""

    def includes(self, name: str) -> bool:
        """Return whether a parameter is trained."""
        return matches(name, self.only) and not matches(name, self.frozen)

    def check(self, names: Collection[str], *, no_weights: Collection[str] = ()) -> None:
        """Check the patterns against the parameter names of the full model; raise ConfigError if a
        pattern matches nothing, or no parameter but `no_weights` is trained."""
        for pattern in self.frozen:
            check_pattern(pattern, names, key="optimizer.frozen_params", noun="parameter")
        if not any(self.includes(name) for name in names if name not in no_weights):
            raise ConfigError.at(
                "optimizer.frozen_params",
                f"must leave a parameter to train, got {', '.join(self.frozen)}",
            )

    def freeze_rest(self, model: nn.Module) -> None:
        """Set `requires_grad = False` on the parameters that are not trained."""
        for name, parameter in model.named_parameters():
            if not self.includes(name):
                parameter.requires_grad_(False)


M = TypeVar("M", bound=LanguageModel)


def cast(model: M, dtype: torch.dtype) -> M:
    """Convert the weights of a model to `dtype` in place, and return the model.

    Router biases stay float32: rounded to 16 bits they would select other experts.
    """
    kept = [(bias, bias.detach()) for bias in router_biases(model)]
    model.to(dtype)
    for bias, wide in kept:
        bias.data = wide
    return model


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters of a model, and the work per token."""

    num_parameters: int
    """All parameters. A tied matrix counts once."""
    num_multiplied: int
    """Weights that multiply each token, including the experts that it is sent to."""
    num_frozen: int = 0
    """Weights of `num_multiplied` that are not trained."""
    num_head: int
    """Weights of the output head, which are part of `num_multiplied`."""
    attention_width: int
    """Sum of `AttentionModule.width` over all layers without a window."""
    window_widths: Mapping[int, int] = field(default_factory=dict)
    """Sum of `AttentionModule.width` over the layers with each window, by window."""
    num_idle: int = 0
    """Parameters of the experts that a token is not sent to."""
    multiplied_by_layer: tuple[int, ...] = ()
    """`num_multiplied` of each block. Empty: all blocks are equal."""
    num_experts: Mapping[str, int] = field(default_factory=dict)
    """Number of experts of each `MoELayer`, by module name."""

    @property
    def num_active(self) -> int:
        """Parameters without the experts that a token is not sent to."""
        return self.num_parameters - self.num_idle

    def flops_per_token(self, seq_len: int) -> int:
        """Return the FLOPs of training on one token, forward and backward: 6 N - 2 F + 12 W S.

        N is the number of weights in matrix products, F of them are frozen and have no gradient,
        W = L H D for L layers of H heads of width D, S = seq_len, or the window if that is shorter.
        A multiply and an add are two FLOPs.

        MFU figures follow this convention of PaLM's appendix B (arXiv:2204.02311): attention counts
        in full although half of it is masked, and recomputation, norms, softmax and other
        elementwise work do not count.
        """
        windows = sum(w * min(window, seq_len) for window, w in self.window_widths.items())
        products = 6 * self.num_multiplied - 2 * self.num_frozen
        return products + 12 * (self.attention_width * seq_len + windows)


def count_multiplied(model: LanguageModel) -> dict[str, int]:
    """Return how many weights of each parameter multiply a token, by name.

    Every parameter of two or more dimensions multiplies each token, except those of an
    `nn.Embedding`, which are looked up. A tied head multiplies by the embedding all the same. Of
    the experts only those that a token is sent to count.
    """
    assert model.tok_embeddings is not None, "a stage cannot be counted"
    assert model.output is not None, "a stage cannot be counted"
    looked_up = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    if not any(p.ndim > 1 for p in model.output.parameters()):
        looked_up.remove(id(model.tok_embeddings.weight))
    chosen = {
        id(p): p.numel() // len(p) * module.num_chosen
        for module in model.modules()
        if isinstance(module, GroupedExperts)
        for p in module.parameters()
    }
    return {
        name: chosen.get(id(p), p.numel())
        for name, p in model.named_parameters()
        if p.ndim > 1 + (id(p) in chosen) and id(p) not in looked_up
    }


def count(model: LanguageModel) -> Counts:
    """Count the parameters and FLOPs of a full model, which may be on the meta device."""
    multiplied = count_multiplied(model)
    parameters = dict(model.named_parameters())
    widths: Counter[int | None] = Counter()
    for module in model.modules():
        if isinstance(module, AttentionModule):
            widths[module.window] += module.width
    in_head = [n for name, n in multiplied.items() if name.startswith("output.")]
    return Counts(
        num_parameters=sum(p.numel() for p in parameters.values()),
        num_multiplied=sum(multiplied.values()),
        num_head=sum(in_head) or multiplied["tok_embeddings.weight"],
        attention_width=widths.pop(None, 0),
        window_widths={window: width for window, width in widths.items() if window is not None},
        num_idle=sum(parameters[name].numel() - n for name, n in multiplied.items()),
        multiplied_by_layer=tuple(
            sum(n for name, n in multiplied.items() if name.startswith(f"layers.{layer}."))
            for layer in model.layers
        ),
        num_experts={
            name: len(next(layer.experts.parameters()))
            for name, layer in find_moe_layers(model).items()
        },
    )
