"""Any dense decoder of the library transformers, from its config.json.

The modules are those of transformers, and all else is ours. Attention is replaced through
transformers' attention interface, so documents, windows and context parallelism are those of every
model here. The roles under tensor parallelism are read from transformers' own plan.

The computation of a model is tried, not believed: it runs once on the meta device. The trial shows
the mask of each layer, whether every attention comes through the interface, and whether the logits
are a multiple of the product of the last norm and the head, which is computed here in chunks. A
model that does something else is refused before anything is loaded. `_init_weights` runs under a
recorder, so that initial weights have its distributions and are drawn by `init.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.models.attention import causal_attention
from torchtitan.models.init import Constant, Init, Normal
from torchtitan.models.interface import (
    AttentionModule,
    Documents,
    LanguageModel,
    Output,
    TiedOutput,
)
from torchtitan.models.settings import TRANSFORMERS
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import UNUSED, HFFormat, ModelSpec, TensorRole

TRAINED, TRIED = "torchtitan", "torchtitan_trial"
"""Names of attention in transformers: of training, and of the trial."""
ROLES: Mapping[str, TensorRole] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "head_norm",
}
"""Roles by the styles of transformers' plans. A module of another style has none."""
VARYING = ("dynamic", "longrope")
"""Types of rope whose wavelengths depend on the longest sequence of a batch."""
KNOWN = ("scaling", "dropout", "sliding_window", "is_causal", "position_ids", "use_cache")
"""Arguments of attention that are followed here, or change nothing. Others are refused."""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(DecoderConfig):
    """A config.json, and the sizes that it implies."""

    config: str
    """The content of config.json, in JSON."""

    def given(self, *, of_family: bool) -> dict[str, Any]:
        """Return the sizes that config.json implies, and `config`."""
        implied = {"config", *sizes_of(self.config)}
        return {k: v for k, v in super().given(of_family=of_family).items() if k in implied}

    def violations(self) -> Iterator[Violation]:
        """Yield a violation for each size that is not config.json's."""
        sizes = sizes_of(self.config)
        for size in fields(DecoderConfig):
            own, in_file = getattr(self, size.name), sizes.get(size.name, size.default)
            if own != in_file:
                rule = f"is {in_file} in config.json, got {own}; remove it"
                yield Violation((size.name,), rule)


def read_sizes(content: Mapping[str, Any]) -> TransformersConfig:
    """Return the sizes of the model of a config.json; raise ConfigError if transformers cannot
    build it, or its weights are quantized."""
    kept = {key: value for key, value in content.items() if key not in UNUSED}
    config = json.dumps(kept, sort_keys=True)
    return TransformersConfig(config=config, **sizes_of(config))


@lru_cache(maxsize=8)
def sizes_of(content: str) -> Mapping[str, Any]:
    """Return the sizes in a config.json, given as JSON, by their names here."""
    config = _load(json.loads(content))
    with _refusing("has no sizes of a decoder"):
        dim, num_heads = config.hidden_size, config.num_attention_heads
        sizes = {
            "dim": dim,
            "num_layers": config.num_hidden_layers,
            "num_heads": num_heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or num_heads,
            "hidden_dim": getattr(config, "intermediate_size", None) or 4 * dim,
            "vocab_size": config.vocab_size,
            "head_dim": getattr(config, "head_dim", None) or dim // num_heads,
        }
        assert all(type(size) is int and size > 0 for size in sizes.values()), sizes
        return {**sizes, "tie_embeddings": bool(config.tie_word_embeddings)}


def _load(content: Mapping[str, Any]) -> Any:
    """Return transformers' configuration."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        rule = f'"{TRANSFORMERS}" needs pip install "transformers>=5": {error}'
        raise ConfigError.at("model.name", rule) from error
    model_type = content.get("model_type")
    arguments = {k: value for k, value in content.items() if k not in (*UNUSED, "model_type")}
    with _refusing(f"has a config.json that transformers cannot read as {model_type!r}"):
        config = AutoConfig.for_model(model_type, **arguments)
    ropes = getattr(config, "rope_parameters", None) or {}
    rope_types = {
        r["rope_type"] for r in (ropes, *ropes.values()) if isinstance(r, dict) and "rope_type" in r
    }
    _refuse_if(rope_types & set(VARYING), "has a rope that depends on the batch")
    _refuse_if("quantization_config" in content, "has quantized weights")
    return config


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Raise an error of transformers' code, which may have any class, as a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the families raise what they like
        _refuse_if(True, f"{problem}: {error}")


def _refuse_if(is_wrong: object, problem: str) -> None:
    if is_wrong:
        raise ConfigError.at("model.name", f'"{TRANSFORMERS}" cannot train a model that {problem}')


class Core(AttentionModule):
    """Attention of one layer, between the rotated heads and the last projection."""

    documents: Documents | None = None
    """Documents of the running batch. Not all families pass further arguments to attention, and
    without pipelines a block is recomputed before the next batch starts."""

    def __init__(self, *, width: int, window: int | None, factor: float) -> None:
        super().__init__()
        self.width, self.window, self._factor = width, window, factor
        self.attend = partial(causal_attention, window=window) if window else causal_attention

    def forward(self, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        """Return the output (B, S, H, D)."""
        q_BHSD = q_BHSD if self._factor == 1.0 else q_BHSD * self._factor
        return self.attend(q_BHSD, k_BKSD, v_BKSD, self.documents).transpose(1, 2)


class Transformers(LanguageModel):
    """A model of transformers in the parts that every model here has."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        from transformers.core_model_loading import revert_weight_conversion

        assert isinstance(config, TransformersConfig)
        causal = _build(json.loads(config.config))
        base = causal.base_model
        stored = revert_weight_conversion(causal, dict(causal.named_parameters()))
        names = {id(p): name for name, p in stored.items()}
        rules = _initial_rules(causal)
        stacks = {n: m for n, m in base.named_children() if isinstance(m, nn.ModuleList)}
        _refuse_if(len(stacks) != 1, f"has not one list of layers but {len(stacks)}")
        [(stack, layers)] = stacks.items()
        embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
        norm, self._factor = _try_out(causal, base=base, layers=layers, head=head)
        self.tok_embeddings, self.norm = embedding, norm
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        for layer in layers:
            for child in layer.children():
                child.register_forward_pre_hook(_pass_by_position, with_kwargs=True)
        is_tied = head.weight is embedding.weight
        _refuse_if(is_tied != config.tie_embeddings, "ties its head unlike its config.json")
        self.output = TiedOutput() if is_tied else Output(config.dim, config.vocab_size, bias=False)
        sources = {name: id(p) for name, p in self.named_parameters()}
        if not is_tied:
            sources["output.weight"] = id(head.weight)
        elsewhere = names.keys() - sources.values()
        _refuse_if(elsewhere, f"has other parameters: {', '.join(names[i] for i in elsewhere)}")
        self.hf_names = {name: names[i] for name, i in sources.items()}
        """Names of the parameters in Hugging Face's files."""
        self._rules = {name: rules.get(i, "nothing") for name, i in sources.items()}
        plan = getattr(base.config, "base_model_tp_plan", None) or {}
        self.roles = _find_roles(self, {n.replace(stack, "layers", 1): s for n, s in plan.items()})
        """Roles under tensor parallelism, as `ModelSpec.tensor_plan`."""
        self._hidden = [base]  # it calls the layers; as a submodule it would name them twice
        self._cores = [module for module in self.modules() if isinstance(module, Core)]
        self.eval()  # dropout, which only transformers has, is never applied
        self._rotary = []
        for name, child in list(base.named_children()):
            if child is not embedding and any(True for _ in child.buffers()):  # wavelengths
                with torch.device("cpu"), _refusing(f"has another {name} than a rotary embedding"):
                    self._rotary.append(type(child)(base.config))
                setattr(base, name, self._rotary[-1])

    def initial(self, name: str) -> Init:
        """Return the distribution that transformers draws from, truncated; raise ConfigError if it
        is neither normal nor constant."""
        rule = self._rules[name]
        _refuse_if(isinstance(rule, str), f"fills {name} by {rule}")
        assert not isinstance(rule, str)
        return rule

    def forward(
        self,
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, or the summed loss: see `LanguageModel.forward`."""
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        [base] = self._hidden
        for child in self._rotary:
            child.to(tokens_BS.device)
        for core in self._cores:
            core.documents = documents
        x_BSC = base(
            tokens_BS,
            position_ids=positions if positions.ndim > 1 else positions[None],
            use_cache=False,
        ).last_hidden_state
        x_BSC = x_BSC if self._factor == 1.0 else x_BSC * self._factor
        return self.head(x_BSC, labels)


def _pass_by_position(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pass the stream as the first argument, where tensor parallelism gathers it."""
    if args or "hidden_states" not in kwargs:
        return None
    return (kwargs.pop("hidden_states"),), kwargs


# -- the trial ---------------------------------------------------------------------------------


def _build(content: Mapping[str, Any]) -> Any:
    """Build transformers' model with attention for the trial."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(TRAINED, lambda m, q, k, v, *_, **__: (m.core(q, k, v), None))
    AttentionInterface.register(TRIED, _note)
    AttentionMaskInterface.register(TRIED, _last_rows)
    with _refusing("transformers cannot build"):
        return AutoModelForCausalLM.from_config(_load(content), attn_implementation=TRIED)


def _note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, None]:
    """Note the arguments of a layer's attention."""
    module.__dict__.setdefault("noted", []).append((query.shape, attention_mask, settings))
    shape = (*query.transpose(1, 2).shape[:3], value.shape[-1])
    return torch.empty(shape, device="meta"), None


def _last_rows(*, q_length: int, mask_function: Callable[..., Tensor], **settings: Any) -> Tensor:
    """Return the keys that the last two queries see, (1, 1, 2, S)."""
    with torch.device("cpu"):
        keys, zero = torch.arange(q_length), torch.tensor(0)
        return mask_function(zero, zero, keys[-2:, None], keys).expand(1, 1, 2, q_length)


def _try_out(causal: Any, *, base: Any, layers: Any, head: Any) -> tuple[nn.Module, float]:
    """Run a model on the meta device, and give each layer its `Core`; raise ConfigError if the
    model computes something that this library does not support.

    Returns:
        The last norm, and the factor on the logits.
    """
    _refuse_if(any(p.ndim > 2 for p in layers.parameters()), "has experts or convolutions")
    held = [
        name
        for name, _ in (*layers.named_buffers(), *causal.get_input_embeddings().named_buffers())
    ]
    _refuse_if(held, f"has buffers: {', '.join(held)}")
    sizes = causal.config.to_dict().items()
    windows = [n for key, n in sizes if ("window" in key or "chunk" in key) and type(n) is int]
    seq_len = max([*windows, 4]) + 4
    last: list[tuple[nn.Module, Tensor]] = []
    hooks = [
        child.register_forward_hook(lambda module, inputs, x: last.append((module, x)))
        for child in base.children()
    ]
    probe = _Probe()
    hooks.append(base.register_forward_hook(probe.replace))
    _refuse_if(head.bias is not None, "has a bias in its head")
    causal.set_output_embeddings(probe)
    tokens = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
    with torch.no_grad(), _refusing("does not run without data"):
        logits = causal(tokens, attention_mask=tokens + 1, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    norm, x = last[-1]
    _refuse_if(x is not probe.normed, "does not end with a norm")
    factor = probe.factor(logits)
    for number, layer in enumerate(layers):
        noted = [m for m in layer.modules() if "noted" in m.__dict__]
        is_single = len(noted) == 1 and len(noted[0].noted) == 1
        _refuse_if(not is_single, f"has no attention of transformers' interface in layer {number}")
        [attention] = noted
        [((_, num_heads, _, head_dim), mask, settings)] = attention.__dict__.pop("noted")
        extra = [key for key, value in settings.items() if key not in KNOWN and value is not None]
        _refuse_if(extra, f"has {', '.join(extra)} in the attention of layer {number}")
        window = int(mask[..., 1, :].sum())
        keys = torch.arange(seq_len, device="cpu")
        queries = keys[-2:, None]
        expected = (keys <= queries) & (keys > queries - window)
        _refuse_if(not mask.equal(expected[None, None]), f"has a mask of its own in layer {number}")
        scale = settings.get("scaling") or head_dim**-0.5
        sharpness = scale * head_dim**0.5
        attention.core = Core(
            width=num_heads * head_dim,
            window=None if window == seq_len else window,
            factor=1.0 if math.isclose(sharpness, 1.0) else sharpness,
        )
    causal.set_attn_implementation(TRAINED)
    return norm, factor


class _Probe(nn.Module):
    """A head for the trial, with numbers in place of its input and its output."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.hidden, self.logits = (
                torch.tensor([[[1.0, -2.0]]]),
                torch.tensor([[[-64.0, 32.0]]]),
            )

    def replace(self, base: nn.Module, inputs: object, output: Any) -> Any:
        self.normed, output.last_hidden_state = output.last_hidden_state, self.hidden
        return output

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return self.logits

    def factor(self, logits: Tensor) -> float:
        """Return the factor on the logits; raise ConfigError if that is not all that is done."""
        before, after = self.seen / self.hidden, logits / self.logits
        is_factor = all(
            ratio.numel() == 2 and ratio.allclose(ratio[0, 0, 0]) for ratio in (before, after)
        )
        _refuse_if(not is_factor, "caps or shifts its logits")
        return float(before[0, 0, 0] * after[0, 0, 0])


def _find_roles(model: LanguageModel, styles: Mapping[str, str]) -> dict[str, TensorRole]:
    """Return the roles of transformers' plan, and of the norms, which it leaves out."""
    roles = {
        name: ROLES[style]
        for name, style in styles.items()
        if name.startswith("layers.") and style in ROLES
    }
    containers = {name.rpartition(".")[0] for name, role in roles.items() if role == "column"}
    roles |= dict.fromkeys(containers, "gather")
    for layer in model.layers.values():
        for name, module in layer.named_modules(prefix="layers.*"):
            width = sum(p.numel() for p in module.parameters(recurse=False))
            inside = any(name.startswith(f"{container}.") for container in containers)
            if name not in roles and width and "Norm" in type(module).__name__ and not inside:
                roles[name] = "norm"
    return {"tok_embeddings": "vocabulary", **roles, "norm": "norm", "output": "head"}


# -- initial weights ---------------------------------------------------------------------------


class _Recorder(TorchFunctionMode):
    """Records how each parameter is filled, by its id."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: dict[int, Init | str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            values = (*args, *kwargs.values())
            numbers = [float(value) for value in values if isinstance(value, int | float)]
            match name, numbers:
                case "normal_" | "trunc_normal_", [0.0, std, *_]:
                    rule: Init | str = Normal(std)
                case "zero_" | "zeros_", _:
                    rule = Constant(0.0)
                case "ones_", _:
                    rule = Constant(1.0)
                case "fill_" | "constant_", [number]:
                    rule = Constant(number)
                case _:
                    rule = name
            self.rules[id(values[0])] = rule
        return func(*args, **kwargs)


def _initial_rules(causal: Any) -> dict[int, Init | str]:
    """Return how transformers fills each parameter, by its id."""
    with torch.no_grad(), _Recorder() as recorder, _refusing("has initial weights that fail"):
        for module in causal.modules():
            causal._init_weights(module)
    return recorder.rules


# -- the family --------------------------------------------------------------------------------


def _describe(architecture: DecoderConfig) -> Mapping[str, Any]:
    """Return the fields of a `ModelSpec` that depend on the model."""
    assert isinstance(architecture, TransformersConfig)
    with torch.device("meta"):
        model = Transformers(architecture)
    content = json.loads(architecture.config)
    hf = HFFormat(
        architecture=(content.get("architectures") or [""])[0],
        model_type=content["model_type"],
        names={_star(ours): _star(theirs) for ours, theirs in model.hf_names.items()},
        rotary=frozenset(),
        fixed={},
        config=content,
    )
    return {"tensor_plan": model.roles, "hf": hf}


def _star(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


DEBUG = {
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "vocab_size": 2048,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
SPEC = ModelSpec(
    name=TRANSFORMERS,
    flavors={"debugmodel": read_sizes(DEBUG)},
    build=Transformers,
    describe=_describe,
    read=read_sizes,
)
