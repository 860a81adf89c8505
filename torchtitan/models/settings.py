"""The settings of the model: the sections [model] and [model.rope_scaling].

The sizes of a model are keys of [model] too, each in place of the flavor's: those of all families
here, of which `assemble/model.py` refuses what a family lacks.

Each type of scaling reads some of the keys. A key that the type does not read is refused, not
ignored, which is why none has a default here: the defaults are those of the type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.needs import GIVEN, Needs
from torchtitan.config.overrides import with_overrides
from torchtitan.config.types import (
    STRICT,
    AboveOne,
    AtLeastOne,
    Converters,
    FinitePositive,
    LocalPath,
    Own,
    Text,
)
from torchtitan.models.rope_scaling import reading
from torchtitan.models.sizes import MLAConfig

STRETCHED = reading("factor")
BY_WAVELENGTH = reading("original_max_position")
LLAMA3, YARN = reading("low_freq_factor"), reading("beta_fast")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RopeScalingConfig:
    """The stretch of the rotary wavelengths, for contexts longer than those of pretraining."""

    type: Annotated[
        Literal["flavor", "none", "linear", "llama3", "yarn"],
        Needs("factor", GIVEN, "set it", of=STRETCHED),
        Needs("original_max_position", GIVEN, "set it", of=BY_WAVELENGTH),
    ] = "flavor"
    """flavor: as model.flavor has it; none: no stretch; linear: all alike (position interpolation);
    llama3: long wavelengths alone, as Llama 3.1; yarn: the same by YaRN's rule, and sharper
    attention."""
    factor: Annotated[AtLeastOne | None, Needs("type", STRETCHED)] = None
    """Long wavelengths grow by this factor: the new context length over the one of pretraining."""
    original_max_position: Annotated[PositiveInt | None, Needs("type", BY_WAVELENGTH)] = None
    """Context length of pretraining, in tokens."""
    low_freq_factor: Annotated[FinitePositive | None, Needs("type", LLAMA3)] = None
    """Wavelengths with fewer turns than this in original_max_position grow in full; 1 if not
    given."""
    high_freq_factor: Annotated[FinitePositive | None, Needs("type", LLAMA3)] = None
    """Wavelengths with more turns than this stay; 4 if not given."""
    beta_fast: Annotated[FinitePositive | None, Needs("type", YARN)] = None
    """Wavelengths with more turns than this in original_max_position stay; 32 if not given."""
    beta_slow: Annotated[FinitePositive | None, Needs("type", YARN)] = None
    """Wavelengths with fewer turns than this grow in full; 1 if not given."""
    attention_factor: Annotated[FinitePositive | None, Needs("type", YARN)] = None
    """Queries and keys are multiplied by this; 0.1 ln(factor) + 1 if neither this nor the next two
    are given."""
    mscale: Annotated[FinitePositive | None, Needs("type", YARN)] = None
    """DeepSeek's: with mscale_all_dim, rotated channels are multiplied by g(mscale) /
    g(mscale_all_dim), where g(m) = 0.1 m ln(factor) + 1."""
    mscale_all_dim: Annotated[FinitePositive | None, Needs("type", YARN)] = None
    """DeepSeek's: the scores of latent attention are multiplied by the square of
    g(mscale_all_dim)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """Which model, and the tokenizer that goes with it."""

    name: Annotated[Text, Own(others=True)] = "llama3"
    """Model family: a key of torchtitan.models.families.MODELS, or the import path of your own
    ModelSpec, "package.module:SPEC"."""
    flavor: Text = "debugmodel"
    """Size within the family, e.g. debugmodel, small, 1B, 3B, 8B, 70B, 405B; or "hf": family, sizes
    and tokenizer are those of the Hugging Face folder in checkpoint.initial_load_path, which is
    also meant if initial_load_in_hf is true and no flavor is given."""
    tokenizer_path: LocalPath = "bpe_2048"
    """Built-in name (bpe_2048, byte), tiktoken file (Llama 3's tokenizer.model), or tokenizer.json
    or its folder."""
    converters: Annotated[
        Converters,
        Needs("training.mixed_precision_param", ("bfloat16", "auto")),
        Needs("training.dtype", "float32"),
        Needs("lora.rank", 0),
        Needs("parallelism.tensor_parallel_degree", 1),
        Needs("parallelism.pipeline_parallel_degree", 1),
    ] = ()
    """What layers are converted to before they are trained: "float8", as [quantize.linear.float8]
    says; empty: nothing."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding and of the output head; the flavor's if not given."""
    rope_theta: AboveOne | None = None
    """Base of the rotary wavelengths; the flavor's if not given."""
    rope_scaling: RopeScalingConfig = Field(default_factory=RopeScalingConfig)
    """Stretch of the rotary wavelengths."""


def model_section(sizes: type) -> type[ModelConfig]:
    """Return [model] with the sizes of a family as keys."""
    return with_overrides(ModelConfig, of=sizes, remark="In place of the flavor's.")


ALL_SIZES = MLAConfig
"""Has the sizes of every family here."""
if TYPE_CHECKING:
    ModelSection = ModelConfig
else:
    ModelSection = model_section(ALL_SIZES)
HF = "hf"
"""The flavor, and the name, of a job whose model is that of a Hugging Face folder."""
