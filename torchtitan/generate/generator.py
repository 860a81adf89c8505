"""Build a model that generates text, on one device or with tensor parallelism.

Under tensor parallelism all ranks work on the same token. The residual stream is replicated and not
split along the sequence, which is one token long. Each rank holds full experts, and reads only its
own parts of the matrices.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.checkpoint.source import WeightSource
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from torchtitan.finetune.chat import ChatTemplate, find_template
from torchtitan.models.interface import LanguageModel, cast
from torchtitan.models.spec import ModelSpec
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.expert import apply_expert_parallel, find_uneven_experts
from torchtitan.parallel.tensor import apply_tensor_parallel, find_uneven_sizes, find_unplanned

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A model with its tokenizer and chat template."""

    model: LanguageModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None if the tokenizer has none, or it was not requested."""
    stop_ids: frozenset[int]
    """Tokens that end a text."""
    begin_ids: Sequence[int] = ()
    """Tokens before a text that is not a chat."""

    def answer_stop_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer: those that end a text, and the end of a turn."""
        end = None if self.template is None else self.template.end_of_turn()
        return self.stop_ids | ({self.tokenizer.special_tokens[end]} if end else set())


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model on disk."""

    spec: ModelSpec
    model: LanguageModel
    """The model on the meta device."""
    weights: WeightSource
    dtype: str
    """Type of the stored weights."""
    tokenizer: str
    """Path of the tokenizer."""
    chat_template: str | None
    """Path of a chat template that replaces the tokenizer's."""
    stop_ids: frozenset[int]
    """Tokens that end a text."""
    begins: bool = False
    """Whether the model was trained on texts that follow the tokenizer's `begin_ids`."""


def build_generator(
    pretrained: Pretrained,
    *,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    chats: bool = False,
    dtype: str | None = None,
) -> Generator:
    """Build a model and read its weights.

    `mesh` has the ranks that share the matrices; None: this process only. `dtype` None: the stored
    type. Raises UserError if the tokenizer is missing or does not fit, or the ranks cannot share
    the model.
    """
    try:
        tokenizer = build_tokenizer(pretrained.tokenizer)
    except DataError as error:
        raise DataError(f"{error}; name the model's tokenizer by --tokenizer") from error
    check_vocabulary(tokenizer, model_vocab_size=pretrained.model.config.vocab_size)
    template = None
    if chats:
        template = find_template(
            pretrained.chat_template, tokenizer=tokenizer, tokenizer_path=pretrained.tokenizer
        )
    _parallelize(pretrained, mesh=mesh)
    return Generator(
        model=read_model(pretrained, device=device, dtype=dtype),
        tokenizer=tokenizer,
        template=template,
        stop_ids=pretrained.stop_ids | {tokenizer.eos_id},
        begin_ids=tokenizer.begin_ids if pretrained.begins else (),
    )


def read_model(pretrained: Pretrained, *, device: torch.device, dtype: str | None) -> LanguageModel:
    """Return the model with its weights in `dtype`, None for the stored type."""
    model = cast(pretrained.model, getattr(torch, pretrained.dtype)).to_empty(device=device)
    pretrained.weights.read(dict(model.named_parameters()))
    return cast(model, getattr(torch, dtype or pretrained.dtype))


def _parallelize(pretrained: Pretrained, *, mesh: DeviceMesh | None) -> None:
    """Shard the model over the ranks of a mesh, in place."""
    model, spec = pretrained.model, pretrained.spec
    if "cache" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"{spec.name} cannot generate text: its forward has no argument `cache` "
            f"(docs/extend.md)"
        )
    assert model.output is not None
    # tensor parallelism needs a loss for the sharded head; generation does not call it
    model.output.loss = build_loss(None if mesh is None else mesh.get_group())
    if mesh is None:
        return
    if unplanned := find_unplanned(model, plan=spec.tensor_plan):
        raise ConfigError(f"the number of ranks must be 1, got {mesh.size()}: {unplanned}")
    if misfit := find_uneven_sizes(model.config, tp=mesh.size()):
        raise ConfigError(
            f"the number of ranks must divide heads, feed-forward width and vocabulary, got "
            f"{misfit}"
        )
    if uneven := find_uneven_experts(model, ep=mesh.size()):
        raise ConfigError(f"the number of ranks must divide the experts of a layer, got {uneven}")
    apply_tensor_parallel(
        model,
        mesh=mesh,
        plan=spec.tensor_plan,
        sequence_parallel=False,
        loss_parallel=True,
    )
    apply_expert_parallel(model, mesh=mesh)
