"""Models of transformers: the same numbers as in its own loop, or refused in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.masking_utils import create_causal_mask
from transformers.models.smollm3 import modeling_smollm3

from tests.jobs import TINY
from torchtitan import Config, load_config, load_model, train
from torchtitan.base.errors import ConfigError, UserError
from torchtitan.hf.folder import open_folder
from torchtitan.models.families import find_model
from torchtitan.models.init import Constant, Normal, initialize
from torchtitan.models.interface import Documents, LanguageModel
from torchtitan.models.settings import ModelSection
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.tensor import find_unplanned

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 264,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "attention_dropout": 0.0,
}
WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3, **WINDOW, "sliding_window_pattern": 2},
    "cwm": WINDOW,
    "ernie4_5": {},
    "exaone4": {**WINDOW, "sliding_window_pattern": 4},
    "glm": {},
    "glm4": {},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.5},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5},
    "helium": {},
    "hunyuan_v1_dense": {},
    "jais2": {},
    "ministral": WINDOW,
    "ministral3": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "persimmon": {"num_key_value_heads": 4},
    "phi3": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"hidden_dropout": 0.5},
    "starcoder2": WINDOW,
}
B, S = 2, 32
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def write_folder(folder: Path, family: str, **sizes: Any) -> Any:
    """Write a small model with random weights; return transformers' own."""
    config = AutoConfig.for_model(
        family.split()[0], **{**SIZES, **FAMILIES.get(family, {}), **sizes}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        biases = (buffer for name, buffer in model.named_buffers() if name.endswith("bias"))
        for parameter in (*model.parameters(), *biases):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return model.eval()


def build(folder: Path, **settings: Any) -> LanguageModel:
    """Build the model of a folder, with its weights."""
    chosen = ModelSection(name="transformers", flavor=str(folder), **settings)
    spec, architecture = find_model(chosen)
    model = spec.build_meta(architecture).to_empty(device="cpu")
    weights = open_folder(folder, spec=spec, architecture=architecture, group=None)
    weights.read(dict(model.named_parameters()))
    assert model.output is not None
    model.output.loss = build_loss(None, num_chunks=2)
    return model


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 264, (B, S + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:].clone()


def ten_steps(theirs: Any, ours: LanguageModel, after_first: Callable[[], None] = int) -> None:
    """Train both models alike; call `after_first` with the first gradients."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (theirs, ours)]
    for step in range(10):
        tokens, labels = batch(step)
        expected = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
        loss = ours(tokens, labels=labels) / labels.numel()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
        for optimizer, value in zip(optimizers, (expected, loss), strict=True):
            optimizer.zero_grad()
            value.backward()
        if step == 0:
            after_first()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.promise("hf")
@pytest.mark.slow(gate=["exaone4", "gpt_neox", "granite"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_steps_and_every_gradient_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    theirs = write_folder(tmp_path, family)
    ours = build(tmp_path)

    def compare_gradients() -> None:
        wanted = revert_weight_conversion(theirs, dict(theirs.named_parameters()))
        for name, parameter in ours.named_parameters():
            gradient = wanted[ours.hf_names[name]].grad
            difference = (parameter.grad - gradient).norm()
            assert difference <= 1e-5 * gradient.norm() + 1e-8, name

    ten_steps(theirs, ours, compare_gradients)


@pytest.mark.parametrize("family", ["exaone4", "gpt_neox", "stablelm"])
def test_documents_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    theirs = write_folder(tmp_path, family)
    ours = build(tmp_path)
    tokens, _ = batch(0)
    documents = Documents(((12, 20), (32,)))
    logits = ours(tokens, positions=documents.positions(), documents=documents)
    for row in range(B):
        for first, last in documents.bounds(row):
            alone = theirs(tokens[row : row + 1, first:last]).logits[0]
            torch.testing.assert_close(logits[row, first:last], alone, rtol=1e-4, atol=1e-5)


ROWS = re.findall(r"^\| (FSDP|refused)([^|]*)\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
CLAIMS = {name: (can + rest).strip() for can, rest, names in ROWS for name in names.split(", ")}


@pytest.mark.parametrize("family", CLAIMS)
def test_the_page_says_what_is_refused(family: str, tmp_path: Path) -> None:
    content = {"model_type": family, **SIZES, **FAMILIES.get(family, {})}
    (tmp_path / "config.json").write_text(json.dumps(content))
    settings = ModelSection(name="transformers", flavor=str(tmp_path))
    if CLAIMS[family].startswith("refused"):
        with pytest.raises(ConfigError, match="name"):
            find_model(settings)
        return
    spec, architecture = find_model(settings)
    unplanned = find_unplanned(spec.build_meta(architecture), plan=spec.tensor_plan)
    assert bool(unplanned) == ("no plan" in CLAIMS[family])


def test_initial_weights_have_the_deviations_of_transformers(tmp_path: Path) -> None:
    theirs = write_folder(tmp_path, "gpt_neox", initializer_range=0.05)
    ours = build(tmp_path)
    initialize(ours, seed=1)
    for name, parameter in ours.named_parameters():
        rule = ours.initial(name)
        if isinstance(rule, Normal):
            assert rule.std == 0.05
            assert 0.9 < parameter.std() / 0.05 < 1.1
        else:
            assert isinstance(rule, Constant)
            assert (parameter == rule.value).all()
    norm = theirs.gpt_neox.final_layer_norm
    assert ours.initial("norm.weight") == Constant(1.0)
    assert ours.initial("norm.bias") == Constant(0.0)
    assert norm.bias is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama4_text", "num_experts_per_tok": 1},  # attention in chunks
        {"model_type": "no_such_family"},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_attention_heads": "4"},
        {"vocab_size": 0},
        {"layer_types": ["full_attention"]},  # of the wrong length
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_wrong_config_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    content = {"model_type": "smollm3", **SIZES, **changes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="name"):
        find_model(ModelSection(name="transformers", flavor=str(tmp_path)))


def test_attention_that_is_not_done_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"model_type": "smollm3", **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(content))
    settings = ModelSection(name="transformers", flavor=str(tmp_path))
    forward = modeling_smollm3.SmolLM3Attention.forward
    with monkeypatch.context() as patch:
        capped = partialmethod(forward, softcap=30.0)
        patch.setattr(modeling_smollm3.SmolLM3Attention, "forward", capped)
        with pytest.raises(ConfigError, match="softcap"):
            find_model(settings)
    find_model(settings)
    in_chunks = partial(create_causal_mask, and_mask_function=lambda b, h, q, k: q // 4 == k // 4)
    monkeypatch.setattr(modeling_smollm3, "create_causal_mask", in_chunks)
    with pytest.raises(ConfigError, match="mask"):
        find_model(settings)


def test_sizes_are_those_of_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, "smollm3")
    with pytest.raises(ConfigError, match="num_layers"):
        build(tmp_path, num_layers=2)
    with pytest.raises(ConfigError, match="rope_theta"):
        build(tmp_path, rope_theta=1e6)


def job(folder: Path, run: Path, **settings: Any) -> Config:
    run.parent.joinpath("job.toml").write_text(TINY.replace('flavor = "tiny"\n', ""))
    own = {
        "job.dump_folder": run,
        "model.name": "transformers",
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.initial_load_path": folder,
        "training.dataset_cache": run.parent / "cache",
        "training.steps": 4,
    }
    return load_config(run.parent / "job.toml", **{**own, **settings})


@pytest.mark.slow
def test_a_run_resumes_without_the_folder_and_its_export_is_like_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_folder(folder, "exaone4")
    exporting = {"checkpoint.last_save_in_hf": True}
    once = train(job(folder, tmp_path / "once", **exporting))
    train(job(folder, tmp_path / "twice", **{"training.steps": 2}))
    source = folder.rename(tmp_path / "moved")
    again = train(job(folder, tmp_path / "twice"))
    assert [row["loss"] for row in again.rows] == [row["loss"] for row in once.rows]
    assert [row["grad_norm"] for row in again.rows] == [row["grad_norm"] for row in once.rows]
    export = tmp_path / "once" / "checkpoint" / "export" / "step-4"
    with (
        safe_open(source / "model.safetensors", "pt") as a,
        safe_open(export / "model.safetensors", "pt") as b,
    ):
        assert sorted(a.keys()) == sorted(b.keys())
    kept = {"max_position_embeddings", "eos_token_id", "torch_dtype", "dtype", "use_cache"}
    stored, written = (
        {k: v for k, v in json.loads((f / "config.json").read_text()).items() if k not in kept}
        for f in (source, export)
    )
    assert {**stored, **written} == stored
    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    ours = load_model(tmp_path / "once", dtype="float32")
    tokens, _ = batch(0)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_another_config_is_another_model(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder", "smollm3")
    train(job(tmp_path / "folder", tmp_path / "run", **{"training.steps": 1}))
    config = tmp_path / "folder" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-03'))
    with pytest.raises(UserError, match="options"):
        train(job(tmp_path / "folder", tmp_path / "run"))
