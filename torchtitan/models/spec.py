"""The description of a model family: how to build it, how it is split, its flavors.

`ModelSpec` is one entry of `MODELS`, a table of modules that are imported when they are looked up:
a registry with decorators would hide where an entry comes from and depend on the order of imports.
`interface.py` defines the module that a family builds, and `check_contract` compares the two.

Three rules hold for every family. All state is parameters, because nothing would fill, cast, move
or save a buffer. Tensor parallelism places every parameter, or is refused
(`ModelSpec.tensor_plan`). A tensor of Hugging Face is one parameter, one entry of a parameter
along its first dimension, or the rows of several parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from torchtitan.models.init import Constant, Normal
from torchtitan.models.interface import LanguageModel
from torchtitan.models.sizes import DecoderConfig

TensorRole = Literal[
    "vocabulary",
    "norm",
    "head_norm",
    "joint_norm",
    "sinks",
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
"""The role of a module when several ranks share a layer's matrices.

- vocabulary: an embedding, sharded by rows.
- norm: works on each token independently. Its weights are replicated.
- head_norm: works on each attention head (B, S, H, D) independently. A rank has its own heads.
- joint_norm: works on the heads of all ranks together, which it gathers.
- sinks: returns a number per head. A rank has its own heads'.
- gather: contains matrices, and gathers the sequence for all of them.
- column: a matrix sharded by its output channels.
- gathered_column: a column that gathers its own input.
- row: a matrix sharded by its input channels. The partial results are summed.
- copied: a replicated matrix, applied to the rank's part of the sequence.
- shared: a module without weights whose result, used by all heads, is gathered.
- head: makes the logits from the gathered sequence, with its own weight or the embedding's.
- route: sends the tokens of the rank's part of the sequence to experts.
- gate: multiplies these tokens by its replicated weights in `product(x, weight)`.
- experts: not sharded by tensor parallelism, see `parallel/expert.py`.
"""

UNUSED = ("auto_map", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of config.json that do not change what a model computes, or name code."""
EACH = "#"
"""Stands for the index along a parameter's first dimension in a name of Hugging Face."""


REQUIRED = object()
NESTED_THETA = "rope_parameters.sliding_attention.rope_theta"
"""Key for the rope base of layers with a window in a family that has no key beside the table."""


@dataclass(frozen=True)
class Size:
    """One size in Hugging Face's config.json."""

    field: str
    """Field of the family's sizes."""
    type: type = int
    """int, float, bool, or list: the numbers of the first layers, from 0, which `field` counts.
    str: a list with one of `layer_types` per layer."""
    default: object = REQUIRED
    """Value that transformers uses if the key is missing, the key that has it, or a pattern."""
    none_as: float | None = None
    """Value in the file where the size is None here, such as `n_group: 1`."""
    layer_types: Mapping[str, object] | None = None
    """Values in the file of the letters of `layer_pattern`."""
    interval: str = ""
    """Key for the length of the pattern, whose last letter is another type than the rest."""
    power: float = 1
    """The value in the file to this power is the size: -0.5 for a scale that is 1 / sqrt(value)."""


@dataclass(frozen=True, kw_only=True)
class HFFormat:
    """How Hugging Face's files store a family: tensor names, and the sizes in config.json."""

    architecture: str
    """Entry of `architectures` in config.json."""
    model_type: str
    """`model_type` in config.json."""
    names: Mapping[str, str]
    """Hugging Face's name of each parameter by our name. A star in both is the layer. A # means
    that each entry along the first dimension, such as an expert, is a tensor of its own.
    Parameters with one name are the rows of one tensor, in the order of this table."""
    rotary: frozenset[str]
    """Our names of the parameters whose rows or elements are rotated channels of heads, which are
    in another order there."""
    fixed: Mapping[str, object]
    """Keys of config.json that must have this value if present, as `Decoder` supports no other."""
    required: frozenset[str] = frozenset()
    """Those of `fixed` that must be present, because another value is transformers' default."""
    each_layer: Mapping[str, object] = field(default_factory=dict)
    """Like `fixed`, for keys with a list of one value per layer."""
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """Sizes by their keys in config.json, except the sizes of the rotary embedding."""
    implied: Mapping[str, object] = field(default_factory=dict)
    """Sizes that all models of the family share. A config.json does not state another one."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of a key that some versions of transformers write."""
    float32: frozenset[str] = frozenset()
    """Our names of the parameters that are always stored in float32."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole config.json of one model, in place of all tables above but `names`."""
    alternating: frozenset[str] = frozenset()
    """Hugging Face's names of tensors whose last dimension has the rows of experts, alternating
    between the parameters that share the name. Matrices are transposed."""
    more_layers: str = ""
    """Key for the number of extra layers after the last one. They are neither read nor written:
    DeepSeek predicts further tokens with them."""


NO_HF_FILES = HFFormat(architecture="", model_type="", names={}, rotary=frozenset(), fixed={})
"""For a family that Hugging Face does not have."""

RopeOrder = Literal["interleaved", "halves"]
"""Which channels of a head are rotated together: (2i, 2i + 1), as here, or (i, i + D/2)."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A family of models: its named sizes and how to build one of them."""

    name: str
    """Key of the family in MODELS."""
    flavors: Mapping[str, DecoderConfig]
    """Sizes by name."""
    build: Callable[[DecoderConfig], LanguageModel]
    """Builds the module on the current default device, which may be meta."""
    tensor_plan: Mapping[str, TensorRole] = field(default_factory=dict)
    """Roles by module name, a star for any layer: how tensor parallelism splits the model. Empty:
    the model cannot be split. Every module with parameters needs a role, because the global
    gradient norm relies on each parameter being on the tp axis, sharded or replicated.
    `parallel.tensor.find_unplanned` reports a module without one."""
    stages: bool = False
    """Whether `forward` also runs a pipeline stage, which lacks some of the parts."""
    hf: HFFormat = NO_HF_FILES
    """How Hugging Face's files store the model."""
    read: Callable[[Mapping[str, Any]], DecoderConfig] | None = None
    """Returns the sizes of a config.json. None: the tables of `hf` say where they stand."""
    describe: Callable[[DecoderConfig], Mapping[str, Any]] | None = None
    """Returns the fields of this class that depend on the sizes. None: no field does."""
    torchtitan_rope: RopeOrder = "interleaved"
    """Row order of wq and wk in checkpoints of torchtitan 0.2, which use the same names."""

    @property
    def sizes(self) -> type[DecoderConfig]:
        """Class of the flavors, whose fields are keys of [model]."""
        return type(next(iter(self.flavors.values())))

    @property
    def of_family(self) -> dict[str, Any]:
        """Fields that all flavors have in common and no job can change."""
        return next(iter(self.flavors.values())).given(of_family=True)

    def build_meta(self, config: DecoderConfig) -> LanguageModel:
        """Build the module on the meta device, without memory for its parameters."""
        with torch.device("meta"):
            return self.build(config)


def check_contract(model: nn.Module, *, spec: ModelSpec) -> None:
    """Check what no layout could train, or would train differently: see `LanguageModel`.

    A family that breaks the contract is wrong code, so the checks are assertions. For a family that
    a job names by import path they are reported as an error of `model.name`.
    """
    assert isinstance(model, LanguageModel), f"{spec.name} must build a LanguageModel, got {model}"
    numbers = [str(number) for number in range(model.config.num_layers)]
    assert list(model.layers) == numbers, f"layers must be numbered, got {list(model.layers)}"
    assert model.output is not None
    is_tied = next(model.output.parameters(), None) is None
    assert is_tied == model.config.tie_embeddings, f"tie_embeddings must be {is_tied} for its head"
    buffers = [name for name, _ in model.named_buffers()]
    assert not buffers, f"a model must have no buffers, got {', '.join(buffers)}"
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        assert first == name, f"a parameter must have one name, got {first} and {name}"
        assert parameter.ndim, f"a parameter must have a dimension, to be sharded: {name}"
        rule: object = model.initial(name)
        assert isinstance(rule, Normal | Constant), f"initial({name!r}) must be Normal or Constant"
