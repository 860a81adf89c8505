"""A trained model that generates text, whole on one device or split over ranks.

Tensor parallelism is the layout in which all ranks work on one token. The residual stream is
copied, not split along the sequence, which is one token long. Experts are dealt out whole to the
ranks. Each rank reads its own part of the matrices and nothing else.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.checkpoint.source import WeightSource
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from torchtitan.finetune.chat import ChatTemplate
from torchtitan.finetune.chat_files import find_template
from torchtitan.models.interface import LanguageModel, cast
from torchtitan.models.spec import ModelSpec
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.expert import apply_expert_parallel, find_uneven_experts
from torchtitan.parallel.tensor import apply_tensor_parallel, find_uneven_sizes, find_unplanned

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A model, and what turns its tokens into text."""

    model: LanguageModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """Of its chats; None: it has none, or none was asked for."""
    stop_ids: frozenset[int]
    """Tokens that end a text."""
    context: int | None = None
    """Tokens of the longest text that it is made for; None: not known."""

    def answer_stop_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer in a chat: those of a text, and a turn's end."""
        ending = None if self.template is None else self.template.end_of_turn()
        return self.stop_ids | ({self.tokenizer.special_tokens[ending]} if ending else set())


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model on disk, and what its folder says of it."""

    spec: ModelSpec
    model: LanguageModel
    """Without memory for its parameters, which `weights` holds."""
    weights: WeightSource
    dtype: str
    """As the weights are stored."""
    tokenizer: str
    """The tokenizer's path."""
    chat_template: str | None
    """The file to take in place of the tokenizer's template."""
    stop_ids: frozenset[int]
    """Tokens that end a text."""
    context: int | None = None
    """Tokens of the longest text that it is made for; None: not known."""


def build_generator(
    found: Pretrained,
    *,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    chats: bool = False,
    dtype: str | None = None,
) -> Generator:
    """Build the model with its weights, split over the ranks of `mesh`.

    Without `chats` no chat template is looked for. `dtype`: to compute in, None: as the weights are
    stored.

    Raises:
        UserError: The tokenizer is not there, or does not fit, or the model cannot be split over so
            many ranks.
    """
    path = found.tokenizer
    ids = _find_tokenizer(path)
    check_vocabulary(ids, model_vocab_size=found.model.config.vocab_size)
    template = None
    if chats:
        template = find_template(found.chat_template, tokenizer=ids, tokenizer_path=path)
    _split(found, mesh=mesh)
    return Generator(
        model=read_model(found, device=device, dtype=dtype),
        tokenizer=ids,
        template=template,
        stop_ids=found.stop_ids | {ids.eos_id},
        context=found.context,
    )


def read_model(found: Pretrained, *, device: torch.device, dtype: str | None) -> LanguageModel:
    """Give the model its weights, or this rank's part of them, in `dtype`; None: as stored."""
    model = cast(found.model, getattr(torch, found.dtype)).to_empty(device=device)
    found.weights.read(dict(model.named_parameters()))
    return cast(model, getattr(torch, dtype or found.dtype))


def _find_tokenizer(path: str) -> Tokenizer:
    try:
        return build_tokenizer(path)
    except DataError as error:
        raise DataError(f"{error}; name the tokenizer of these weights by --tokenizer") from error


def _split(found: Pretrained, *, mesh: DeviceMesh | None) -> None:
    """Split the model over the ranks of a mesh, in place."""
    model, spec = found.model, found.spec
    if "cache" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"to generate text a model must take a cache of keys and values, and the forward of "
            f"{spec.name} has no argument `cache`; docs/extend.md says what it is"
        )
    assert model.output is not None
    # each rank takes the loss from its own part of the vocabulary; generation never asks for it
    model.output.loss = build_loss(None if mesh is None else mesh.get_group())
    if mesh is None:
        return
    if unplanned := find_unplanned(model, plan=spec.tensor_plan):
        raise ConfigError(f"the number of ranks must be 1, got {mesh.size()}: {unplanned}")
    if misfit := find_uneven_sizes(model.config, tp=mesh.size()):
        raise ConfigError(
            f"the number of ranks must divide the model's heads, feed-forward width and "
            f"vocabulary, got {misfit}; start as many ranks with torchrun"
        )
    if uneven := find_uneven_experts(model, ep=mesh.size()):
        raise ConfigError(
            f"the number of ranks must divide the experts of a layer, got {uneven}; start as many "
            f"ranks with torchrun"
        )
    apply_tensor_parallel(
        model,
        mesh=mesh,
        plan=spec.tensor_plan,
        sequence_parallel=False,
        loss_parallel=True,
    )
    apply_expert_parallel(model, mesh=mesh)
