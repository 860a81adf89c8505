"""The model that a job names: a flavor, with sizes of its own, or a Hugging Face folder's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.naming import naming
from torchtitan.base.errors import ConfigError, UserError
from torchtitan.config.settings import to_toml
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.hf.config import sizes_of
from torchtitan.job import load_config
from torchtitan.layout import find_layout
from torchtitan.models.families import MODELS, describe_model, find_model, to_settings
from torchtitan.models.settings import ModelConfig
from torchtitan.models.sizes import DecoderConfig, RopeScaling
from torchtitan.resume_rules import Job, resolve_model, trajectory_differences
from torchtitan.tools.config import main as check_config

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


def test_a_size_of_a_flavor_may_be_taken_away() -> None:
    given = ["num_dense_layers=0", "num_shared_experts=0", "q_lora_rank=0"]
    settings = model_of("name=deepseek_v3", "flavor=tiny", *given)
    spec, found = find_model(settings)
    none = dict.fromkeys(("num_dense_layers", "num_shared_experts", "q_lora_rank"))
    flavor = spec.flavors["tiny"]
    assert all(getattr(flavor, name) for name in none)
    assert found == dataclasses.replace(flavor, **none)
    model = spec.build_meta(found)
    names = {name for name, _ in model.named_parameters()}
    assert not any("wq_a" in n or "shared_experts" in n or "feed_forward" in n for n in names)
    assert all(found.has_parameter(name) for name in names)


@pytest.mark.parametrize(
    ("options", "key", "remedy"),
    [
        (["dim=200", "num_heads=6", "num_kv_heads=6"], "model.dim", "200 and 6"),
        (["dim=48"], "model.head_dim", "3"),
        (["head_dim=7"], "model.head_dim", "7"),
        (["num_heads=6", "dim=192"], "model.num_kv_heads", "16 and 6"),
        (["window=5"], "model.window", "llama3"),
        (["flavor=hf"], "model.flavor", "dim, num_layers, num_heads"),
        (["flavor=hf", "dim=32", "vocab_size=8"], "model.flavor", "num_layers"),
        (["flavor=smal"], "model.flavor", "'small'"),
        (["name=hf", "flavor=tiny"], "model.name", 'flavor = "hf"'),
        (["name=lama3"], "model.name", "'llama3'"),
    ],
)
def test_sizes_that_make_no_model_are_refused(options: list[str], key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_model(model_of(*options))
    [mistake] = error.value.mistakes
    assert not isinstance(mistake, str)
    assert mistake.keys[0] == key
    assert remedy in mistake.rule


def test_all_that_is_wrong_with_sizes_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        find_model(model_of("head_dim=7", "num_heads=6", "window=5"))
    assert len(error.value.mistakes) == 3


@pytest.mark.parametrize("name", MODELS)
def test_sizes_written_as_settings_are_the_same_model(name: str) -> None:
    for flavor, config in MODELS[name].flavors.items():
        wanted = dataclasses.replace(config, rope_scaling=YARN) if flavor == "tiny" else config
        spec, found = find_model(to_settings(MODELS[name], wanted))
        assert (spec.name, found) == (name, wanted)


FLAVOR = ["--model.name=qwen2", "--model.flavor=tiny"]
STRETCHED = ["--model.rope_scaling.type=yarn", "--model.rope_scaling.factor=4"]
STRETCHED += ["--model.rope_scaling.original_max_position=64"]


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


LLAMA_31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_31 |= {"original_max_position_embeddings": 8192}
OWN = ["--model.rope_scaling.type=llama3", "--model.rope_scaling.factor=16"]
OWN += ["--model.rope_scaling.original_max_position=8192"]
VALIDATED = ["--validation.enable", "--validation.dataset=synthetic", "--validation.seq_len=131073"]


def test_without_a_tokenizer_in_the_folder_none_is_assumed(tmp_path: Path) -> None:
    config = resolve_model(load_config(job_from(folder_of(tmp_path / "theirs"))))
    with pytest.raises(UserError, match=naming("[model] tokenizer_path", tmp_path / "theirs")):
        build_tokenizer(config.model.tokenizer_path)


def test_a_run_of_no_step_may_be_followed_by_one_of_some() -> None:
    none, some = (Job(config=load_config([f"--training.steps={n}"])) for n in (0, 100))
    assert trajectory_differences(none, some) == []
    assert trajectory_differences(some, none) != []


def test_what_a_job_gives_itself_is_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs")
    options = ["--model.vocab_size=300", "--model.rope_theta=777", "--model.tokenizer_path=byte"]
    options += ["--model.rope_scaling.type=linear", "--model.rope_scaling.factor=2"]
    config = resolve_model(load_config(job_from(folder, *options)))
    _, found = find_model(config.model)
    assert (found.vocab_size, found.rope_theta, found.num_layers) == (300, 777.0, 3)
    assert found.rope_scaling is not None
    assert config.model.tokenizer_path == "byte"
    named = load_config(job_from(folder, "--model.flavor=tiny", "--model.name=qwen2"))
    assert resolve_model(named) == named


def test_a_folder_of_another_family_than_named_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs")
    with pytest.raises(UserError, match=naming("LlamaForCausalLM", "Qwen2ForCausalLM")):
        resolve_model(load_config(job_from(folder, "--model.name=llama3")))
    with pytest.raises(UserError, match=naming("MistralForCausalLM", "GPT2LMHeadModel")):
        resolve_model(load_config(job_from(folder_of(folder, architectures=["GPT2LMHeadModel"]))))
    with pytest.raises(UserError, match=naming("initial_load_path", tmp_path / "nowhere")):
        resolve_model(load_config(job_from(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("name", "is_on_hub"),
    [("Qwen/Qwen3-0.6B-Base", True), ("{}/nowhere", False), ("tests/nowhere", False)],
)
def test_a_folder_that_is_not_there_is_named_with_how_to_get_it(
    name: str, is_on_hub: bool, tmp_path: Path, capsys
) -> None:
    path = name.format(tmp_path)
    option = f"--checkpoint.initial_load_path={path}"
    job = ["--checkpoint.enable", option, "--checkpoint.initial_load_in_hf"]
    assert check_config(job) == 2
    said = capsys.readouterr().err
    assert naming(option.split("=")[0], path).match(said)
    assert (f"hf download {path} --local-dir DIR" in said) == is_on_hub
    assert ("config.json" in said) != is_on_hub


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
