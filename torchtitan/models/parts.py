"""The pieces of one model that a rank holds.

A rank has the whole model, or one or more stages of a pipeline. Optimizer, checkpoints and initial
weights go by parameter names, which are those of the whole model in every piece, so they see one
flat set of parameters whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import nn

from torchtitan.models.contract import LanguageModel

TIED = "tok_embeddings.weight"


class HasParameters(Protocol):
    """A model, or a rank's parts of one."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Walk the parameters by name."""
        ...


class ModelParts:
    """This rank's pieces, in the order of the layers.

    If tied embeddings lie on two stages, the first stage's is the parameter. The last stage
    multiplies by a copy that is not a parameter of its own (`tied_copy`), so that nothing updates,
    saves or counts it twice.
    """

    def __init__(self, parts: Sequence[LanguageModel]) -> None:
        self._parts = tuple(parts)

    def __iter__(self) -> Iterator[LanguageModel]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Walk the parameters by their names in the whole model."""
        for part in self._parts:
            for name, parameter in part.named_parameters():
                if not (part.embedding_is_copy and name == TIED):
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Walk the parameters."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The copy of the embedding that the output multiplies by, if it is on this rank."""
        copies = [part.tok_embeddings for part in self._parts if part.embedding_is_copy]
        return copies[0].weight if copies and copies[0] is not None else None

    @property
    def tied_source(self) -> nn.Parameter | None:
        """The embedding's parameter, if it is on this rank."""
        return dict(self.named_parameters()).get(TIED)
