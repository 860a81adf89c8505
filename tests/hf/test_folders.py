"""Hugging Face's folders against `transformers`: what it wrote is read, what we write it reads."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.models.reference import (
    VARIANTS,
    family_name,
    new_decoder,
    random_decoder,
    reference_of,
)
from tests.naming import naming
from torchtitan.api import load_model
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.rows import runs, to_their_rows
from torchtitan.checkpoint.source import ParameterFilter
from torchtitan.hf import config as hf_config
from torchtitan.hf import export as hf_export
from torchtitan.hf.config import architecture_of, read_config, sizes_of
from torchtitan.hf.export import HFExport, export
from torchtitan.hf.folder import open_folder
from torchtitan.hf.model import chosen_rotation
from torchtitan.hf.names import Names
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS, find_model, to_settings
from torchtitan.models.settings import ModelConfig, RopeScaling
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.tools.dcp_folder import to_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LLAMA = MODELS["llama3"]
TOKENS = torch.arange(120).reshape(2, 60) * 7 % 263
EXPERTS = "experts, first layer dense"
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
    assert torch.equal(to_their_rows(ours, head_dim=6), reordered)
    for start in range(18):
        for stop in range(start, 19):
            for head_dim, there in ((6, reordered), (None, ours)):
                piece = torch.full((stop - start, 5), float("nan"))
                for rows, places in runs(start, stop - start, head_dim=head_dim):
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


def test_old_versions_find_the_factor_of_yarn(tmp_path: Path) -> None:
    """They stretch by max_position_embeddings over the original one, and pass `factor` over."""
    for name in ("yarn", "yarn by hand"):
        carried = {"max_position_embeddings": 4096}
        folder = exported(random_decoder(VARIANTS[name]), tmp_path / name, carried=carried)
        said = json.loads((folder / "config.json").read_text())
        original = said["rope_scaling"]["original_max_position_embeddings"]
        assert said["max_position_embeddings"] / original == said["rope_scaling"]["factor"] == 8.0
    folder = exported(random_decoder(VARIANTS["scaled"]), tmp_path, carried=carried)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 4096


def test_no_file_is_larger_than_the_limit_but_for_a_single_tensor(tmp_path: Path) -> None:
    folder = exported(random_decoder(VARIANTS["grouped"]), tmp_path, max_file_bytes=20_000)
    held = [load_file(file) for file in folder.glob("*.safetensors")]
    sizes = [[tensor.nbytes for tensor in file.values()] for file in held]
    assert all(sum(file) <= 20_000 or len(file) == 1 for file in sizes)
    assert max(map(len, sizes)) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    assert set(index["weight_map"]) == {name for file in held for name in file}


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


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "vocab_size", "rms_norm_eps", "rope_theta")
FULL = {"use_sliding_window": False, "max_window_layers": 99, "sliding_window": None}
TIED, HEADS = {"tie_word_embeddings": True}, {"head_dim": 128}
EXPERT = {"norm_topk_prob": True, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
EXPERT |= {"mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False}
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
    said |= {**dict(zip(SIZES, sizes, strict=True)), **more}
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
    spec, architecture = to_dcp(folder, tmp_path / "out", dtype=torch.float32, models=MODELS)
    assert spec == LLAMA
    assert sizes_of(architecture, LLAMA.hf) == sizes_of(config, LLAMA.hf)
    model = Decoder(config)
    state = model.state_dict()
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert equal(state, random_decoder(config).state_dict())


@pytest.mark.parametrize("name", ["yarn by hand", "interpolated", "scaled", "single kv head"])
def test_the_sizes_of_a_folder_as_settings(name: str, tmp_path: Path) -> None:
    """What is written from a job with [model.rope_scaling] is read without it, and said."""
    config = dataclasses.replace(VARIANTS[name], num_layers=3)
    folder = exported(random_decoder(config), tmp_path)
    found = architecture_of(read_config(folder), spec=LLAMA)
    spec, again = find_model(to_settings(LLAMA, found))
    assert spec == LLAMA
    assert sizes_of(again, LLAMA.hf) == sizes_of(found, LLAMA.hf) == sizes_of(config, LLAMA.hf)


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
    _, architecture = to_dcp(out, tmp_path / "dcp", dtype=torch.float32, models=MODELS)
    assert architecture == config


def test_experts_in_any_number_of_files(tmp_path: Path) -> None:
    """An expert is never split, and a layer's may be in several files."""
    model = random_decoder(VARIANTS["experts"])
    folder = exported(model, tmp_path, max_file_bytes=8_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(5)]
    assert len({index[name] for name in names}) > 1
    assert equal(imported(folder, model.config).state_dict(), model.state_dict())


def without(part: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: [tensors.pop(name) for name in [*tensors] if part in name]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mlp_only_layers": [1]}, naming("mlp_only_layers", "[1]")),
        ({"mlp_only_layers": [0, 1]}, naming("2 of 2")),
        ({"num_experts_per_tok": 9}, naming("num_experts", 9, 5)),
        ({"num_local_experts": 0}, naming("num_experts", 0)),
    ],
)
def test_experts_that_no_model_has_are_refused(
    changes: dict[str, Any], said: re.Pattern[str], tmp_path: Path
) -> None:
    folder = theirs(tmp_path, VARIANTS[EXPERTS])
    change_config(**changes)(folder)
    with pytest.raises(CheckpointError, match=said):
        architecture_of(read_config(folder), spec=MODELS["qwen3_moe"])


def test_what_some_writers_leave_in_a_folder_is_not_read(tmp_path: Path) -> None:
    """The head of tied embeddings, and the rotation's frequencies of old versions."""
    config = VARIANTS["tied"]
    folder = theirs(tmp_path, config)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, folder / "model.safetensors")
    assert equal(imported(folder, config).state_dict(), random_decoder(config).state_dict())


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    """Reading it as tied gives other logits, and so does any guess."""
    folder = theirs(tmp_path, VARIANTS["tied"])
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][262, 31] += 1
    save_file(state, folder / "model.safetensors")
    for read in (lambda: imported(folder, VARIANTS["tied"]), lambda: load_model(folder)):
        with pytest.raises(CheckpointError, match=naming("tie_word_embeddings", "lm_head.weight")):
            read()


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


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def keys(said: str, **changes: Any) -> tuple[str, Callable[[Path], None]]:
    return said, change_config(**changes)


def rope(said: str, **changes: Any) -> tuple[str, Callable[[Path], None]]:
    return said, change_config(rope_parameters=changes)


def tensors(said: str, change: Callable[[dict[str, Tensor]], Any]) -> tuple[str, Any]:
    return said, change_tensors(change)


GATE = "model.layers.1.mlp.experts.3.up_proj.weight"
SLIDING = "layer_types must be 'full_attention', got "
MISFITS: dict[str, list[tuple[str, Callable[[Path], None]]]] = {
    "grouped": [
        ("model.safetensors", cut),
        (".bin files", lambda at: (at / "model.safetensors").rename(at / "model.bin")),
        ("config.json", lambda at: (at / "config.json").unlink()),
        ("config.json cannot be read", lambda at: (at / "config.json").write_text("{")),
        keys("hidden_size must be an integer from 1 to 100000000, got '32'", hidden_size="32"),
        keys("it lacks 'num_attention_heads'", num_attention_heads=None),
        tensors(
            "1 missing: 'norm.weight' (model.norm.weight)", lambda t: t.pop("model.norm.weight")
        ),
        tensors("1 unexpected: 'extra'", lambda t: t.update(extra=torch.ones(1))),
        tensors(
            "[5, 32], not [263, 32]", lambda t: t.update({"lm_head.weight": torch.ones(5, 32)})
        ),
        tensors("type I8", lambda t: t.update({"model.norm.weight": torch.ones(32).char()})),
        ("extra in one.", with_index({"extra": "one.safetensors"})),
        ("two.safetensors cannot be read", with_index({"extra": "two.safetensors"})),
        ("got '../", with_index({"extra": "../one.safetensors"})),
        ("weight_map", with_index(["one.safetensors"])),
        keys("num_hidden_layers: 3 in the file, 2 in this job", num_hidden_layers=3),
        keys("rms_norm_eps: 1e-06 in the file, 1e-05 in", rms_norm_eps=1e-6),
        keys("num_attention_heads: 8 in the file, 4 in", num_attention_heads=8, head_dim=4),
        keys("attention_bias must be False, got True", attention_bias=True),
        keys("hidden_act must be 'silu', got 'gelu'", hidden_act="gelu"),
        keys("sliding_window must be None, got 4096", sliding_window=4096),
        keys("got {'bits': 4}", quantization_config={"bits": 4}),
        keys("got ['MistralForCausalLM']", architectures=["MistralForCausalLM"]),
        keys("rope_theta must be", rope_parameters=None, rope_theta="5"),
        keys("partial_rotary_factor must be 1.0, got 0.5", partial_rotary_factor=0.5),
        rope("partial_rotary_factor must be 1.0, got 0.5", partial_rotary_factor=0.5),
        rope("rope_theta: 10000.0 in the file, 500000.0", rope_theta=1e4),
        rope("got 'longrope'", rope_type="longrope", factor=2.0),
        rope("truncate = False", **YARN, truncate=False),
        rope("short_factor = [1.0]", **YARN, short_factor=[1.0]),
        rope("mscale = 0.0", **YARN, mscale=0.0),
        rope("beta_fast = '32'", **YARN, beta_fast="32"),
        rope("factor = True", **{**YARN, "factor": True}),
        rope("yarn needs factor", **{**YARN, "factor": None}),
        rope("rope_scaling: {'rope_ty", **YARN, beta_fast=None, truncate=True),
        rope("got ['yarn']", **{**YARN, "rope_type": ["yarn"]}),
    ],
    "normed heads": [
        keys("use_sliding_window must be False, got True", use_sliding_window=True),
        keys(SLIDING, layer_types=["full_attention", "sliding_attention"]),
        keys(SLIDING, layer_types="sliding_attention"),
        keys("head_dim: 8 in the file, 12 in this job", head_dim=8),
    ],
    "biased": [keys("mlp_bias must be False, got True", mlp_bias=True)],
    "window": [
        keys("sliding_window: None in the file, 7 in this job", sliding_window=None),
        keys("sliding_window must be an integer from 1 to 100000000, got '8'", sliding_window="8"),
    ],
    EXPERTS: [
        keys("num_experts: 6 in the file, 5 in this job", num_local_experts=6),
        keys("norm_topk_prob: True in the file, False in this job", norm_topk_prob=True),
        keys("norm_topk_prob must be true or false, got 1", norm_topk_prob=1),
        keys("mlp_only_layers: [] in the file, [0] in this job", mlp_only_layers=[]),
        keys("decoder_sparse_step must be 1, got 2", decoder_sparse_step=2),
        tensors("number 2 missing", without(".experts.2.up")),
        tensors("has shape [4, 20, 32], not [5, 20, 32]", without(".experts.4.up")),
        tensors("'layers.1.moe.router.gate.weight'", without(".mlp.gate.weight")),
        tensors("((2, 2), 'F32') and", lambda t: t.update({GATE: torch.ones(2, 2)})),
        tensors(
            "'layers.1.moe.experts.w3' must be one tensor",
            lambda t: t.update({"layers.1.moe.experts.w3": torch.ones(5, 20, 32)}),
        ),
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


def test_one_file_may_have_an_index(tmp_path: Path) -> None:
    config = VARIANTS["grouped"]
    folder = theirs(tmp_path, config)
    with_index({})(folder)
    assert equal(imported(folder, config).state_dict(), random_decoder(config).state_dict())


def test_what_is_left_out_may_be_of_another_size(tmp_path: Path) -> None:
    """Another vocabulary, and fewer layers than the model's; nothing else."""
    there = dataclasses.replace(VARIANTS["grouped"], vocab_size=300, num_layers=1)
    folder = theirs(tmp_path, there)
    architecture = VARIANTS["grouped"]
    excluded = ("tok_embeddings.*", "output.*", "layers.1.*")
    patterns = ParameterFilter(exclude=excluded)
    found = open_folder(folder, spec=LLAMA, architecture=architecture, filter=patterns, group=None)
    assert found.tensors["norm.weight"].name == "model.norm.weight"
    for left in excluded:
        fewer = ParameterFilter(exclude=tuple(pattern for pattern in excluded if pattern != left))
        with pytest.raises(CheckpointError, match=re.escape(left.removesuffix("*"))):
            open_folder(folder, spec=LLAMA, architecture=architecture, filter=fewer, group=None)
    other = dataclasses.replace(architecture, norm_eps=1e-6)
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        open_folder(folder, spec=LLAMA, architecture=other, filter=patterns, group=None)


def test_a_rotation_that_the_job_sets_may_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer contexts begin from weights of shorter ones, and the log says so."""
    caplog.set_level(logging.INFO)
    folder = theirs(tmp_path, VARIANTS["scaled"])
    for other in (VARIANTS["yarn"], VARIANTS["interpolated"]):
        with pytest.raises(CheckpointError, match="rope_scaling"):
            open_folder(folder, spec=LLAMA, architecture=other, group=None)
        caplog.clear()
        chosen = {"rope_scaling", "rope_theta"}
        open_folder(folder, spec=LLAMA, architecture=other, may_differ=chosen, group=None)
        [line] = caplog.messages
        assert str(sizes_of(other, LLAMA.hf)["rope_scaling"]) in line
    settings = ModelConfig(rope_theta=100.0, rope_scaling=RopeScaling(type="none"))
    assert chosen_rotation(settings) == {"rope_theta", "rope_scaling"}
    assert chosen_rotation(ModelConfig()) == set()


def test_a_real_head_is_not_lost_to_tied_embeddings(tmp_path: Path) -> None:
    """Names that are left out free no size that they say nothing of."""
    folder = theirs(tmp_path, VARIANTS["grouped"])
    tied = VARIANTS["tied"]
    with pytest.raises(CheckpointError, match=naming("output.weight", "lm_head.weight")):
        open_folder(
            folder,
            spec=LLAMA,
            architecture=tied,
            filter=ParameterFilter(exclude=("norm.weight",)),
            group=None,
        )


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


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda block: delattr(block.feed_forward, "w3"), "layers.1.feed_forward.w3"),
        (lambda block: setattr(block, "gate", nn.Linear(2, 2)), "layers.1.gate.b"),
    ],
)
def test_a_checkpoint_of_other_parameters_writes_no_folder(
    change: Any, part: str, tmp_path: Path
) -> None:
    model = random_decoder(VARIANTS["grouped"])
    change(model.layers["1"])
    with pytest.raises(CheckpointError, match=part):
        exported(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_name_of_experts_that_is_missing_is_found() -> None:
    spec = MODELS["qwen3_moe"]
    sizes = spec.flavors["tiny8"]
    ours = [name for name, _ in spec.build_meta(sizes).named_parameters()]
    assert Names(spec.hf, sizes).find_mismatch(ours) is None
    some = {n: theirs for n, theirs in spec.hf.names.items() if not n.endswith("experts.w3")}
    found = Names(replace(spec.hf, names=some), sizes).find_mismatch(ours)
    assert found is not None
    assert "no name for layers.1.moe.experts.w3" in found


def test_a_checkpoint_of_a_part_of_a_tensor_writes_no_folder(tmp_path: Path) -> None:
    model = random_decoder(VARIANTS["grouped"])
    step = checkpoint_of(model, tmp_path / "step-1")
    metadata = dcp.FileSystemReader(step / "model").read_metadata()
    metadata.state_dict_metadata["norm.weight"].chunks[0].sizes = torch.Size([3])
    (step / "model" / ".metadata").write_bytes(pickle.dumps(metadata))
    settings = HFExport(names=Names(family_of(model.config).hf, model.config))
    with pytest.raises(CheckpointError, match=naming("norm.weight", 3, 32)):
        export(step, tmp_path / "out", settings=settings, group=None)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_width_of_heads_that_a_folder_leaves_out_is_the_one_it_states(tmp_path: Path) -> None:
    """Else a run from the folder would not resume after the folder was saved again."""
    folder = theirs(tmp_path, VARIANTS["grouped"])
    sizes = []
    for width in (None, 8):
        rewrite(folder / "config.json", lambda content, n=width: content.update(head_dim=n))
        sizes.append(architecture_of(read_config(folder), spec=LLAMA))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({**YARN, "type": "default"}, "yarn"),
        ({"type": "linear", "factor": 2.0, "rope_type": None}, "linear"),
        ({"rope_type": "default", "type": "mrope"}, None),
    ],
)
def test_rope_type_comes_before_type(table: dict, expected: str | None, tmp_path: Path) -> None:
    folder = theirs(tmp_path, VARIANTS["grouped"])
    rewrite(folder / "config.json", lambda content: content.update(rope_parameters=table))
    scaling = architecture_of(read_config(folder), spec=LLAMA).rope_scaling
    assert (None if scaling is None else scaling.type) == expected


def test_an_adapter_is_no_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    spec = MODELS["llama3"]
    sizes = {"spec": spec, "architecture": spec.flavors["tiny"], "group": None}
    for read in (
        lambda: open_folder(tmp_path, **sizes),
        lambda: load_model(tmp_path),
        lambda: read_config(tmp_path),
    ):
        with pytest.raises(CheckpointError, match="adapter"):
            read()


def test_experts_packed_in_memory_are_named(tmp_path: Path) -> None:
    folder = theirs(tmp_path, VARIANTS[EXPERTS])
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(2, 2)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=naming("gate_up_proj", "one tensor per expert")):
        imported(folder, VARIANTS[EXPERTS])


def test_a_factor_of_yarn_that_transformers_ignores(tmp_path: Path) -> None:
    config = VARIANTS["yarn"]
    folder = theirs(tmp_path, config)
    scaling = json.loads((folder / "config.json").read_text())
    key = "rope_parameters" if "rope_parameters" in scaling else "rope_scaling"
    change_config(**{key: {**scaling[key], "attn_factor": 0.8782488562869419}})(folder)
    assert equal(imported(folder, config).state_dict(), random_decoder(config).state_dict())
