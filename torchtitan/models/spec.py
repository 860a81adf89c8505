"""What the rest of the library knows of a model: how to build it, how it is split, its flavors.

`ModelSpec` is one entry of `MODELS`, a dictionary;
a registry with decorators would hide where an entry comes from and depend on the order of imports.
`contract.py` says what the module itself must be.

Three things hold for every family: all state is parameters (`ModelSpec.find_buffers`), tensor
parallelism places every parameter or is refused (`ModelSpec.tensor_plan`), and a tensor of Hugging
Face is one parameter, or one entry along its first dimension (`HFFormat.find_shared`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from torchtitan.models.sizes import DecoderConfig

if TYPE_CHECKING:
    from torchtitan.models.contract import LanguageModel

TensorRole = Literal[
    "vocabulary",
    "norm",
    "head_norm",
    "gather",
    "column",
    "gathered_column",
    "row",
    "copied",
    "shared",
    "head",
    "route",
    "gate",
    "experts",
]
"""What a module does where several ranks share a layer's matrices.

vocabulary: an embedding, split by rows. norm: works on each token by itself, its weights are
copies. head_norm: the same on each attention head (B, S, H, D), of which a rank has its own.
gather: takes the whole sequence, for all the matrices in it. column: a matrix split by columns of
its output. gathered_column: the same, that gathers its input itself. copied: a matrix of which each
rank has all, for its own part of the sequence. shared: no weights, gathers what all heads use. row:
one split by rows of its input, whose parts of the result are summed. head: the
matrix, or what multiplies by the embedding's, from the whole sequence to logits. route: sends each
token to experts, on each rank those of its own part of the sequence. gate: multiplies those by its
weights, which are copies, in `product(x, weight)`. experts: never split by this axis, see
`parallel/expert.py`.
"""


EACH = "#"
"""In a name of Hugging Face: the place of a tensor in a parameter of ours."""


@dataclass(frozen=True, kw_only=True)
class HFFormat:
    """How the files of Hugging Face spell a family, whose sizes they call as Llama does."""

    architecture: str
    """What `architectures` of config.json names."""
    model_type: str
    """`model_type` of config.json."""
    names: Mapping[str, str]
    """Their name of each parameter by ours, a star for the layer in both. With a # in theirs each
    entry along the first dimension is a tensor by itself, whose number stands there: experts."""
    rotary: frozenset[str]
    """Those of ours whose rows, or elements, are channels of heads that the rotation pairs: theirs
    are in another order."""
    fixed: Mapping[str, object]
    """Keys of config.json that must have this value if they are there: `Decoder` knows no other."""
    each_layer: Mapping[str, object] = field(default_factory=dict)
    """The same for keys that hold a list, one value per layer."""
    more_counts: Mapping[str, tuple[str, int | float | bool | None]] = field(default_factory=dict)
    """Counts, or null, factors and switches that the family's config.json holds beyond Llama's:
    what the class of its sizes calls each, and what transformers takes where it is left out."""
    lacks: frozenset[str] = frozenset()
    """Keys of Llama's that say nothing of this family."""
    none_there: Mapping[str, int] = field(default_factory=dict)
    """What a count is there where there is none here; 0 there is none here."""
    implied: Mapping[str, object] = field(default_factory=dict)
    """Sizes that no key says, for all models in such files have them so."""
    first_layers: Mapping[str, str] = field(default_factory=dict)
    """Keys that list the first few layers, from 0 on: what the sizes call their number."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names by which some versions of transformers write a key."""
    float32: frozenset[str] = frozenset()
    """Those of ours that are stored in float32 whatever the type of the others."""
    more_layers: str = ""
    """Key for how many layers of another kind lie behind the last one, which are not read: DeepSeek
    predicts further tokens with them. No such layer is written."""

    def find_shared(self) -> list[str]:
        """Return the names in which `names` is not one to one; there must be none.

        Reading and writing rename tensor by tensor: a tensor of theirs that holds several of our
        parameters would be overwritten, and one that several layers share is in one of them.
        """
        counts = Counter(self.names.values())
        return [
            theirs
            for ours, theirs in self.names.items()
            if counts[theirs] > 1 or ours.count("*") != theirs.count("*") or theirs.count(EACH) > 1
        ]


NO_HF_FILES = HFFormat(architecture="", model_type="", names={}, rotary=frozenset(), fixed={})
"""For a family that Hugging Face does not have."""

RopeOrder = Literal["interleaved", "halves"]
"""Which channels of a head turn together: (2i, 2i + 1), as here, or (i, i + D/2)."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A family of models: its named sizes and how to build one of them."""

    name: str
    """Key of the family in MODELS."""
    flavors: Mapping[str, DecoderConfig]
    """Sizes by name."""
    build: Callable[[DecoderConfig], LanguageModel]
    """Makes the module on the device that is the default when it is called, meta included."""
    tensor_plan: Mapping[str, TensorRole] = field(default_factory=dict)
    """Roles by module name, a star for any layer: how tensor parallelism splits the model. Empty:
    it is not split. Every module with parameters needs a role, so that each parameter lies on the
    tp axis, split or copied: `parallel.tensor.find_unplanned` refuses others by name, and
    `parallel.build` checks that every parameter lies on all ranks of its stage, since the global
    gradient norm counts copies along a parameter's own mesh."""
    stages: bool = False
    """Whether `forward` also runs a pipeline stage, which lacks some of the parts."""
    hf: HFFormat = NO_HF_FILES
    """Its weights in the files of Hugging Face."""
    torchtitan_rope: RopeOrder = "interleaved"
    """The order of the rows of wq and wk in checkpoints of torchtitan 0.2, by the same names."""

    @property
    def sizes(self) -> type[DecoderConfig]:
        """The class of its flavors; all fields of it are keys of [model]."""
        return type(next(iter(self.flavors.values())))

    @property
    def of_family(self) -> dict[str, Any]:
        """What all its flavors have in common and no job can change."""
        return next(iter(self.flavors.values())).given(of_family=True)

    def build_meta(self, config: DecoderConfig) -> LanguageModel:
        """Build the module without memory for its parameters."""
        with torch.device("meta"):
            return self.build(config)

    def find_buffers(self, model: LanguageModel) -> list[str]:
        """Return the names of a model's buffers; there must be none.

        All state is parameters: initial weights, FSDP, pipeline stages and checkpoints go by
        parameter names, and nothing would fill, cast, move or save a buffer.
        """
        return [name for name, _ in model.named_buffers()]
