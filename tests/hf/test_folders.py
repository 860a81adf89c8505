"""Hugging Face's folders against `transformers`: what it wrote is read, what we write it reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.reference import (
    VARIANTS,
    family_name,
    new_decoder,
    random_decoder,
    reference_of,
)
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.rows import runs, to_their_rows
from torchtitan.hf import config as hf_config
from torchtitan.hf import export as hf_export
from torchtitan.hf.config import architecture_of, read_config, sizes_of
from torchtitan.hf.export import HFExport, export
from torchtitan.hf.folder import open_folder
from torchtitan.hf.names import Names
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.tools.dcp_folder import from_hf

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LLAMA = MODELS["llama3"]
TOKENS = torch.arange(120).reshape(2, 60) * 7 % 263
EXPERTS = "experts, first layer dense"
HEAD, PACKED = "lm_head.weight", "model.layers.1.mlp.experts.gate_up_proj"
NAMES = (
    "single kv head",
    "scaled",
    "interpolated",
    "yarn",
    "yarn by hand",
    "tied",
    "wide heads",
    "normed heads",
    "normed heads, tied",
    "biased",
    "biased, tied",
    "window",
    "window of one",
    "experts",
    "latent",
    "latent, softmax",
)


def family_of(config: DecoderConfig) -> ModelSpec:
    return MODELS[family_name(config)]


def flavor_of(folder: Path, models: Mapping[str, ModelSpec] = MODELS) -> tuple[str, str] | None:
    """The family and flavor with the sizes of a config.json."""
    config = read_config(folder)
    spec = hf_config.family_of(config, models=models)
    sizes = sizes_of(architecture_of(config, spec=spec), spec.hf)
    fitting = (n for n, flavor in spec.flavors.items() if sizes_of(flavor, spec.hf) == sizes)
    return next(((spec.name, name) for name in fitting), None)


def spec_of(config: DecoderConfig) -> ModelSpec:
    """The family with this size too."""
    family = family_of(config)
    return dataclasses.replace(family, flavors={**family.flavors, "mine": config})


@cache
def files_of(config: DecoderConfig) -> dict[str, bytes]:
    """What transformers writes, by the names of files."""
    with TemporaryDirectory() as folder:
        reference_of(random_decoder(config)).save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def theirs(folder: Path, config: DecoderConfig) -> Path:
    """A folder that transformers wrote."""
    folder.mkdir(exist_ok=True)
    for name, content in files_of(config).items():
        (folder / name).write_bytes(content)
    return folder


def imported(folder: Path, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    model = new_decoder(config).to(dtype)
    found = open_folder(folder, spec=spec_of(config), architecture=config, group=None)
    found.read(dict(model.named_parameters()))
    return model


def checkpoint_of(model: Decoder, folder: Path) -> Path:
    """A step, as far as its weights go."""
    state = model.state_dict()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "model"), no_dist=True)
    return folder


def exported(
    model: Decoder, folder: Path, *, out: str = "out", dtype: torch.dtype | None = None, **more: Any
) -> Path:
    names = Names(family_of(model.config).hf, model.config)
    settings = HFExport(names=names, dtype=dtype, **more)
    step = checkpoint_of(model, folder / "step-1")
    export(step, folder / out, settings=settings, group=None)
    return folder / out


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.promise("round-trip")
def test_any_rows_of_ours_are_found_in_theirs() -> None:
    """By transformers' own formula for Meta's weights, also where a shard cuts a head."""
    ours = torch.randn(18, 5)
    reordered = ours.view(3, 6 // 2, 2, 5).transpose(1, 2).reshape(18, 5)
    assert torch.equal(to_their_rows(ours, heads=(6, 6)), reordered)
    partly = ours.view(3, 6, 5)[:, [0, 2, 1, 3, 4, 5]].reshape(18, 5)
    assert torch.equal(to_their_rows(ours, heads=(6, 4)), partly)
    for start in range(18):
        for stop in range(start, 19):
            for heads, there in (((6, 6), reordered), ((6, 4), partly), (None, ours)):
                piece = torch.full((stop - start, 5), float("nan"))
                for rows, places in runs(start, stop - start, heads=heads):
                    piece[places] = there[rows]
                assert torch.equal(piece, ours[start:stop])


@pytest.mark.promise("hf")
@pytest.mark.parametrize(
    ("name", "shard_size"),
    [*((name, "5GB") for name in NAMES), ("grouped", "20KB"), (EXPERTS, "20KB")],
)
def test_there_and_back(name: str, shard_size: str, tmp_path: Path) -> None:
    config = VARIANTS[name]
    original = random_decoder(config)
    reference = reference_of(original)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    is_sharded = (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    assert is_sharded == (shard_size == "20KB")
    model = imported(tmp_path / "theirs", config)
    assert equal(model.state_dict(), original.state_dict())
    with torch.no_grad():
        expected = reference(TOKENS).logits
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=atol)
        max_file_bytes = 20_000 if is_sharded else hf_export.MAX_FILE_BYTES
        folder = exported(model, tmp_path, max_file_bytes=max_file_bytes)
        again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        assert type(again) is type(reference)
        assert equal(dict(again.named_parameters()), dict(reference.named_parameters()))
        assert torch.equal(again(TOKENS).logits, expected)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (folder / "model.safetensors.index.json").exists() == is_sharded
    assert len(files) == 1 or files[0] == f"model-00001-of-{len(files):05}.safetensors"
    ours = {name: t for file in files for name, t in load_file(folder / file).items()}
    assert ("lm_head.weight" in ours) != config.tie_embeddings


@pytest.mark.promise("hf")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_type(dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_decoder(VARIANTS["tied"])
    folder = exported(model, tmp_path, dtype=dtype)
    again = AutoModelForCausalLM.from_pretrained(folder)
    rounded = {name: t.to(dtype) for name, t in reference_of(model).named_parameters()}
    assert equal(dict(again.named_parameters()), rounded)
    # and back, into either type
    expected = {name: t.to(dtype) for name, t in model.state_dict().items()}
    assert equal(imported(folder, model.config, dtype).state_dict(), expected)
    widened = {name: t.float() for name, t in expected.items()}
    assert equal(imported(folder, model.config).state_dict(), widened)


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.promise("hf")
@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0}},
        {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3"}},
        {"rope_theta": 100.0, "rope_scaling": {"type": "llama3"}},
    ],
)
def test_both_spellings_of_the_rotation_are_read(spelling: dict[str, Any], tmp_path: Path) -> None:
    """transformers 5 writes rope_parameters, 4 rope_theta and rope_scaling."""
    config = VARIANTS["scaled"]
    file, spec = theirs(tmp_path, config) / "config.json", spec_of(config)
    said = {k: v for k, v in json.loads(file.read_text()).items() if not k.startswith("rope_")}
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for factor in (8.0, 9.0):
        table = {"factor": factor, "original_max_position_embeddings": 64, **factors}
        given = {k: {**v, **table} if isinstance(v, dict) else v for k, v in spelling.items()}
        file.write_text(json.dumps({**said, **given}))
        found = architecture_of(read_config(tmp_path), spec=spec)
        assert found.rope_scaling is not None
        assert (found.rope_scaling.type, found.rope_scaling.factor) == ("llama3", factor)
        assert (sizes_of(found, LLAMA.hf) == sizes_of(config, LLAMA.hf)) == (factor == 8.0)


def llama_rope(factor: float) -> dict[str, Any]:
    table = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
    return {"rope_scaling": {**table, "high_freq_factor": 4.0, "low_freq_factor": 1.0}}


LOCAL = "sliding_attention"
GEMMA = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
GEMMA |= {"rope_local_base_freq": 10_000, "sliding_window": 512, "attn_logit_softcapping": None}
OLMO = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
OLMO |= {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
GRANITE = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "vocab_size", "rms_norm_eps", "rope_theta")
FULL = {"use_sliding_window": False, "max_window_layers": 99, "sliding_window": None}
TIED, HEADS = {"tie_word_embeddings": True}, {"head_dim": 128}
EXPERT = {"norm_topk_prob": True, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
EXPERT |= {"mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False}
MIXTRAL = {"sliding_window": None, "router_jitter_noise": 0.0, "router_aux_loss_coef": 0.02}
FEW = {"num_local_experts": 8, "num_experts_per_tok": 2}
PHI = {"attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "rope_scaling": None}
WHOLE = {"sliding_window": None, "partial_rotary_factor": 1.0, "attention_dropout": 0.0}
WHOLE |= {"max_position_embeddings": 16_384, "original_max_position_embeddings": 16_384}
WINDOW = {"sliding_window": 2047, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
PUBLISHED: list[tuple[str, str, tuple[float, ...], dict[str, Any]]] = [
    ("llama3", "1B", (2048, 8192, 16, 32, 8, 128_256, 1e-5, 5e5), {**TIED, **llama_rope(32.0)}),
    ("llama3", "3B", (3072, 8192, 28, 24, 8, 128_256, 1e-5, 5e5), {**TIED, **llama_rope(32.0)}),
    ("llama3", "8B", (4096, 14_336, 32, 32, 8, 128_256, 1e-5, 5e5), llama_rope(8.0)),
    ("llama3", "70B", (8192, 28_672, 80, 64, 8, 128_256, 1e-5, 5e5), llama_rope(8.0)),
    ("llama3", "405B", (16_384, 53_248, 126, 128, 8, 128_256, 1e-5, 5e5), llama_rope(8.0)),
    ("qwen2", "0.5B", (896, 4864, 24, 14, 2, 151_936, 1e-6, 1e6), {**FULL, **TIED}),
    ("qwen2", "1.5B", (1536, 8960, 28, 12, 2, 151_936, 1e-6, 1e6), {**FULL, **TIED}),
    ("qwen2", "3B", (2048, 11_008, 36, 16, 2, 151_936, 1e-6, 1e6), {**FULL, **TIED}),
    ("qwen2", "7B", (3584, 18_944, 28, 28, 4, 152_064, 1e-6, 1e6), FULL),
    ("qwen2", "14B", (5120, 13_824, 48, 40, 8, 152_064, 1e-5, 1e6), FULL),
    ("qwen2", "14B-Instruct", (5120, 13_824, 48, 40, 8, 152_064, 1e-6, 1e6), FULL),
    ("qwen2", "32B", (5120, 27_648, 64, 40, 8, 152_064, 1e-5, 1e6), {**FULL, "use_mrope": False}),
    ("qwen2", "32B-Instruct", (5120, 27_648, 64, 40, 8, 152_064, 1e-6, 1e6), FULL),
    ("qwen2", "72B", (8192, 29_568, 80, 64, 8, 152_064, 1e-5, 1e6), {**FULL, "sliding_window": 9}),
    ("qwen2", "72B-Instruct", (8192, 29_568, 80, 64, 8, 152_064, 1e-6, 1e6), FULL),
    ("qwen3", "0.6B", (1024, 3072, 28, 16, 8, 151_936, 1e-6, 1e6), {**FULL, **HEADS, **TIED}),
    ("qwen3", "1.7B", (2048, 6144, 28, 16, 8, 151_936, 1e-6, 1e6), {**FULL, **HEADS, **TIED}),
    ("qwen3", "4B", (2560, 9728, 36, 32, 8, 151_936, 1e-6, 1e6), {**FULL, **HEADS, **TIED}),
    ("qwen3", "8B", (4096, 12_288, 36, 32, 8, 151_936, 1e-6, 1e6), {**FULL, **HEADS}),
    ("qwen3", "14B", (5120, 17_408, 40, 40, 8, 151_936, 1e-6, 1e6), {**FULL, **HEADS}),
    ("qwen3", "32B", (5120, 25_600, 64, 64, 8, 151_936, 1e-6, 1e6), {**FULL, **HEADS}),
    ("mistral", "7B-v0.1", (4096, 14_336, 32, 32, 8, 32_000, 1e-5, 1e4), {"sliding_window": 4096}),
    ("mistral", "7B-v0.1", (4096, 14_336, 32, 32, 8, 32_000, 1e-5, 1e4), {}),  # the same by default
    ("mistral", "7B", (4096, 14_336, 32, 32, 8, 32_768, 1e-5, 1e6), {"sliding_window": None}),
    (
        "gemma3",
        "1B",
        (1152, 6912, 26, 4, 1, 262_144, 1e-6, 1e6),
        {**GEMMA, "sliding_window_pattern": 6},
    ),
    (
        "gemma3",
        "270M",
        (640, 2048, 18, 4, 1, 262_144, 1e-6, 1e6),
        {**GEMMA, "layer_types": ([LOCAL] * 5 + ["full_attention"]) * 3},
    ),
    ("olmo2", "1B", (2048, 8192, 16, 16, 16, 100_352, 1e-6, 5e5), {"rope_scaling": None}),
    (
        "olmo3",
        "7B",
        (4096, 11_008, 32, 32, 32, 100_278, 1e-6, 5e5),
        {"rope_scaling": OLMO, "layer_types": ([LOCAL] * 3 + ["full_attention"]) * 8},
    ),
    (
        "smollm3",
        "3B",
        (2048, 11_008, 36, 16, 4, 128_256, 1e-6, 5e6),
        {**FULL, **TIED, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4},
    ),
    (
        "granite",
        "2B",
        (2048, 8192, 40, 32, 8, 49_159, 1e-5, 1e7),
        {**TIED, **GRANITE, "residual_multiplier": 0.22},
    ),
    ("mixtral", "8x7B", (4096, 14_336, 32, 32, 8, 32_000, 1e-5, 1e6), {**MIXTRAL, **FEW}),
    ("mixtral", "8x7B", (4096, 14_336, 32, 32, 8, 32_000), MIXTRAL),  # by default
    ("mixtral", "8x22B", (6144, 16_384, 56, 48, 8, 32_768, 1e-5, 1e6), {**MIXTRAL, **FEW}),
    ("phi3", "mini-4k", (3072, 8192, 32, 32, 32, 32_064, 1e-5, 1e4), {**PHI, **WINDOW}),
    ("phi3", "phi-4", (5120, 17_920, 40, 40, 10, 100_352, 1e-5, 250_000), {**PHI, **WHOLE}),
    *(
        (
            "qwen3_moe",
            flavor,
            sizes,
            {**FULL, **HEADS, **EXPERT, "moe_intermediate_size": n, key: 128},
        )
        for flavor, sizes, n in (
            ("30B-A3B", (2048, 6144, 48, 32, 4, 151_936, 1e-6, 1e6), 768),
            ("235B-A22B", (4096, 12_288, 94, 64, 4, 151_936, 1e-6, 1e6), 1536),
        )
        for key in ("num_experts", "num_local_experts")  # the second as transformers 5 writes it
    ),
]


@pytest.mark.promise("hf")
@pytest.mark.parametrize(("family", "flavor", "sizes", "more"), PUBLISHED)
def test_published_models_find_their_flavor(
    family: str, flavor: str, sizes: tuple[float, ...], more: dict[str, Any], tmp_path: Path
) -> None:
    """By the config.json of each; newer writers add the kind of each layer."""
    said = {"architectures": [MODELS[family].hf.architecture], "hidden_act": "silu"}
    said |= {**dict(zip(SIZES, sizes, strict=False)), **more}
    kinds = (
        {"layer_types": ["full_attention"] * int(sizes[2])} if family in ("qwen2", "qwen3") else {}
    )
    for added in ({}, kinds):
        (tmp_path / "config.json").write_text(json.dumps({**said, **added}))
        assert flavor_of(tmp_path) == (family, flavor)


@pytest.mark.promise("interchange")
def test_a_plain_dcp_folder(tmp_path: Path) -> None:
    """What torch.distributed.checkpoint reads by itself."""
    config = VARIANTS["grouped"]
    folder = theirs(tmp_path / "theirs", config)
    told = from_hf(folder, tmp_path / "out", dtype="float32")
    assert f"model.dim = {config.dim}" in told.splitlines()
    model = Decoder(config)
    state = model.state_dict()
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert equal(state, random_decoder(config).state_dict())


@pytest.mark.promise("round-trip")
def test_experts_are_written_as_they_were_read(tmp_path: Path) -> None:
    """Byte for byte: one tensor per expert, as published folders have them."""
    config = VARIANTS[EXPERTS]
    folder = theirs(tmp_path / "theirs", config)
    found = load_file(folder / "model.safetensors")
    gates = [name for name in found if name.endswith(".gate_proj.weight")]
    assert sorted(gates) == [
        "model.layers.0.mlp.gate_proj.weight",
        *(f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in range(5)),
    ]
    out = exported(imported(folder, config), tmp_path)
    assert equal(load_file(out / "model.safetensors"), found)
    assert architecture_of(read_config(out), spec=family_of(config)) == config


def without(part: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: [tensors.pop(name) for name in [*tensors] if part in name]


def change_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / "config.json", lambda content: content.update(changes))


def change_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return apply


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def with_index(weight_map: object) -> Callable[[Path], None]:
    """As if of several files: all of it in one, and an index."""

    def apply(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "one.safetensors")
        names = weight_map
        if isinstance(weight_map, dict):
            names = {
                **dict.fromkeys(load_file(folder / "one.safetensors"), "one.safetensors"),
                **weight_map,
            }
        index = json.dumps({"weight_map": names})
        (folder / "model.safetensors.index.json").write_text(index)

    return apply


def adapter_alone(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


MISFITS: dict[str, list[tuple[str, Callable[[Path], None]]]] = {
    "grouped": [
        ("model.safetensors", cut),
        ("'norm.weight'", change_tensors(lambda t: t.pop("model.norm.weight"))),
        ("'extra'", change_tensors(lambda t: t.update(extra=torch.ones(1)))),
        ("[5, 32]", change_tensors(lambda t: t.update({"lm_head.weight": torch.ones(5, 32)}))),
        ("'../", with_index({"extra": "../one.safetensors"})),
        ("num_hidden_layers", change_config(num_hidden_layers=3)),
        ("rms_norm_eps", change_config(rms_norm_eps=1e-6)),
        ("attention_bias", change_config(attention_bias=True)),
        ("hidden_act", change_config(hidden_act="gelu")),
        ("sliding_window", change_config(sliding_window=4096)),
        ("'bits'", change_config(quantization_config={"bits": 4})),
        ("partial_rotary_factor", change_config(partial_rotary_factor=0.5)),
        ("rope_theta", change_config(rope_parameters={"rope_theta": 1e4})),
        ("'longrope'", change_config(rope_parameters={"rope_type": "longrope", "factor": 2.0})),
    ],
    "tied": [
        ("LoRA adapter", adapter_alone),
        (
            "tie_word_embeddings",
            change_tensors(lambda t: t.update({HEAD: t["model.embed_tokens.weight"] + 1.0})),
        ),
    ],
    "normed heads": [("head_dim", change_config(head_dim=8))],
    "window": [("sliding_window", change_config(sliding_window=None))],
    EXPERTS: [
        ("norm_topk_prob", change_config(norm_topk_prob=True)),
        ("mlp_only_layers", change_config(mlp_only_layers=[])),
        ("number 2", change_tensors(without(".experts.2.up"))),
        ("packs", change_tensors(lambda t: t.update({PACKED: torch.ones(2, 2, 2)}))),
    ],
}


@pytest.mark.parametrize(
    ("name", "said", "damage"), [(name, *row) for name, rows in MISFITS.items() for row in rows]
)
def test_what_does_not_fit_is_named(
    name: str, said: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = theirs(tmp_path, VARIANTS[name])
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        imported(folder, VARIANTS[name])
    assert said in str(error.value)


def test_a_factor_that_transformers_ignores_is_ignored(tmp_path: Path) -> None:
    folder = theirs(tmp_path, VARIANTS["yarn"])
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    change_config(rope_parameters={**rope, "attn_factor": 0.5})(folder)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = imported(folder, VARIANTS["yarn"])(TOKENS)
    torch.testing.assert_close(logits, wanted(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.promise("hf")
def test_an_export_is_whole_or_absent(tmp_path: Path) -> None:
    model = random_decoder(VARIANTS["grouped"])
    folder = exported(model, tmp_path)
    before = load_file(folder / "model.safetensors")
    step = tmp_path / "step-1"
    data = next((step / "model").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-20_000])
    settings = HFExport(names=Names(LLAMA.hf, model.config))
    with pytest.raises(CheckpointError, match=naming(step, "torchtitan convert")):
        export(step, folder, settings=settings, group=None)
    assert equal(load_file(folder / "model.safetensors"), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "step-1"]
    (tmp_path / ".new.tmp").mkdir()
    (tmp_path / ".new.tmp" / "stray").touch()  # of a process that died
    exported(model, tmp_path / "again")
    export(tmp_path / "again" / "step-1", tmp_path / "new", settings=settings, group=None)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
