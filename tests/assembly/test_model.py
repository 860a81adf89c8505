"""The model that a job names: a flavor, with sizes of its own, or a Hugging Face folder's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from torchtitan.config.settings import to_toml
from torchtitan.hf.config import sizes_of
from torchtitan.job import load_config
from torchtitan.layout import find_layout
from torchtitan.models.families import MODELS, describe_model, find_model, to_settings
from torchtitan.models.settings import ModelConfig
from torchtitan.models.sizes import DecoderConfig, RopeScaling
from torchtitan.resume_rules import Job, resolve_model, trajectory_differences

LLAMA = MODELS["llama3"]
YARN = RopeScaling(type="yarn", factor=2.0, original_max_position=64)


def model_of(*options: str) -> ModelConfig:
    return load_config([f"--model.{option}" for option in options]).model


def test_each_size_of_a_flavor_may_be_another_one() -> None:
    given = ["dim=192", "num_layers=5", "num_heads=6", "num_kv_heads=3", "hidden_dim=500"]
    given += ["norm_eps=1e-6", "tie_embeddings=true", "head_dim=30", "vocab_size=3000"]
    settings = model_of("flavor=small", *given)
    _, found = find_model(settings)
    expected = DecoderConfig(
        dim=192,
        num_layers=5,
        num_heads=6,
        num_kv_heads=3,
        hidden_dim=500,
        norm_eps=1e-6,
        tie_embeddings=True,
        head_dim=30,
        vocab_size=3000,
    )
    assert found == expected
    said = describe_model(settings, spec=LLAMA)
    assert "dim 192" in said
    assert "num_heads 6" in said
    assert find_model(model_of("flavor=small"))[1] == LLAMA.flavors["small"]


@pytest.mark.parametrize("name", MODELS)
def test_sizes_written_as_settings_are_the_same_model(name: str) -> None:
    for flavor, config in MODELS[name].flavors.items():
        wanted = dataclasses.replace(config, rope_scaling=YARN) if flavor == "tiny" else config
        spec, found = find_model(to_settings(MODELS[name], wanted))
        assert (spec.name, found) == (name, wanted)


def folder_of(path: Path, *, name: str = "qwen2", **changes: object) -> Path:
    spec = MODELS[name]
    sizes = sizes_of(dataclasses.replace(spec.flavors["tiny"], num_layers=3), spec.hf)
    said = {"architectures": [spec.hf.architecture], "model_type": spec.hf.model_type}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**said, **sizes, **changes}))
    return path


def job_from(folder: Path, *options: str) -> list[str]:
    return [
        "--checkpoint.enable",
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={folder}",
        f"--job.dump_folder={folder.parent / 'run'}",
        *options,
    ]


def test_a_folder_that_is_named_once_says_family_sizes_and_tokenizer(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs")
    for options in ([], ["--model.flavor=hf"], ["--model.name=qwen2", "--model.flavor=hf"]):
        config = resolve_model(load_config(job_from(folder, *options)))
        assert (config.model.name, config.model.tokenizer_path) == ("qwen2", str(folder))
        _, found = find_model(config.model)
        assert (found.num_layers, found.qkv_bias, found.norm_eps) == (3, True, 1e-6)
        assert resolve_model(config) == config
    assert find_layout(config, world_size=1).architecture == found


def test_a_run_has_no_more_need_of_the_folder(tmp_path: Path) -> None:
    """Its settings hold the sizes; a job with the folder's is the same training."""
    folder = folder_of(tmp_path / "theirs")
    job = job_from(folder)
    config = resolve_model(load_config(job))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    (folder / "config.json").unlink()
    again = resolve_model(load_config(job))
    assert again == config
    stored = Job.stored(to_toml(config))
    assert trajectory_differences(stored, Job(config=again)) == []
    deeper = dataclasses.replace(again, model=dataclasses.replace(again.model, num_layers=4))
    [difference] = trajectory_differences(stored, Job(config=deeper))
    assert difference.startswith("model.num_layers")
