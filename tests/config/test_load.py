"""Files: inheritance, what is wrong in them, and the way back to TOML."""

from __future__ import annotations

import random
from dataclasses import is_dataclass, replace

import pytest

import torchtitan
from tests.config.jobs import Jobs, loaded, mistakes_of
from torchtitan.base.errors import ConfigError, Violation
from torchtitan.config.settings import (
    Key,
    Path,
    Rule,
    is_custom_object,
    keys,
    literal,
    sections,
    to_toml,
    values_of,
)
from torchtitan.job import Config, load_config, load_job
from torchtitan.optim.settings import GroupConfig, OptimizerConfig


def test_no_file_means_defaults() -> None:
    assert load_config([]) == Config()


def test_a_file_sets_what_it_names(jobs: Jobs) -> None:
    config = jobs.load("[training]\nsteps = 7\n[training.dataloader]\nnum_workers = 2")
    assert (config.training.steps, config.training.dataloader.num_workers) == (7, 2)
    assert config.training.seq_len == Config().training.seq_len
    assert config.job.config_file == "job.toml"


# --- a job that starts from a folder of Hugging Face -------------------------------------------

FOLDER = '[checkpoint]\nenable = true\ninitial_load_in_hf = true\ninitial_load_path = "base"\n'
OTHER = '[model]\nname = "qwen3"\ntokenizer_path = "byte"\n'
SIZE = 'flavor = "small"\n'


@pytest.mark.parametrize(
    ("text", "options", "model"),
    [
        ("", [], ("hf", "hf", "base")),
        ("", ["--model.name=llama3"], ("llama3", "hf", "base")),
        (f"{OTHER}{SIZE}", [], ("qwen3", "small", "byte")),
        (f'{OTHER}flavor = "hf"', [], ("qwen3", "hf", "byte")),
        (OTHER, [], ("qwen3", "hf", "byte")),
        (f"{OTHER}{SIZE}", ["--model.flavor=hf"], ("hf", "hf", "base")),
        (OTHER, ["--model.flavor=hf"], ("hf", "hf", "base")),
        (OTHER, ["--model.flavor=hf", "--model.name=llama3"], ("llama3", "hf", "base")),
        (OTHER, ["--model.flavor=hf", "--model.tokenizer_path=x"], ("hf", "hf", "x")),
    ],
)
def test_the_model_is_the_folders_where_the_job_asks_for_it(
    jobs: Jobs, text: str, options: list[str], model: tuple[str, str, str]
) -> None:
    got = jobs.load(f"{FOLDER}{text}", *options).model
    assert (got.name, got.flavor, got.tokenizer_path) == model


def test_the_folders_model_is_asked_for_from_python_too(jobs: Jobs) -> None:
    job = jobs.write(f"{FOLDER}{OTHER}{SIZE}")
    for asked in ({"flavor": "hf"}, dict.fromkeys(("name", "flavor", "tokenizer_path"))):
        model = torchtitan.load_config(job, model=asked).model
        assert (model.name, model.flavor, model.tokenizer_path) == ("hf", "hf", "base")


# --- inheritance -------------------------------------------------------------------------------


@pytest.mark.promise("settings")
def test_tables_merge_and_values_replace(jobs: Jobs) -> None:
    jobs.write("[training]\nsteps = 1\nseq_len = 1\nlocal_batch_size = 1", name="a/grand.toml")
    jobs.write(
        'base = "../a/grand.toml"\n[training]\nseq_len = 2\nlocal_batch_size = 2\n'
        '[optimizer]\nno_decay_params = ["a", "b"]',
        name="b/parent.toml",
    )
    config = jobs.load(
        'base = "b/parent.toml"\n[training]\nlocal_batch_size = 3\n'
        '[optimizer]\nno_decay_params = ["c"]',
        "--training.gc_freq=4",
    )
    training = config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (1, 2, 3)
    assert training.gc_freq == 4
    assert config.optimizer.no_decay_params == ("c",)


OPTIONS = '[optimizer]\nname = "SGD"\n[optimizer.options]\na = 1\nb = 2\n'


@pytest.mark.promise("settings")
@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ("[optimizer.options]\nb = 3", [], {"b": 3}),
        ("[optimizer]\noptions = {}", [], {}),
        ("[optimizer.options]\nb = 3", ["--optimizer.options.c", "4"], {"b": 3, "c": 4}),
        ("", ["--optimizer.options.b", "none"], {"a": 1}),
        ("", ["--optimizer.options", "{c = 4}"], {"c": 4}),
        ("", ["--optimizer.options", "none"], {}),
    ],
)
def test_a_table_of_options_replaces_the_one_below_and_keys_of_the_command_line_are_added(
    text: str, options: list[str], wanted: dict[str, object]
) -> None:
    job = loaded(text, *options, base=OPTIONS)
    assert job.config.optimizer.options == wanted
    assert not job.mistakes


@pytest.mark.promise("settings")
def test_the_command_line_wins(jobs: Jobs) -> None:
    assert jobs.load("[training]\nsteps = 'x'", "--training.steps", "8").training.steps == 8


def test_a_mistake_names_the_file_that_holds_it(jobs: Jobs) -> None:
    jobs.write("[training]\nsteps = 'ten'", name="shared/base.toml")
    mistakes = jobs.mistakes('base = "shared/base.toml"\n[training]\nseq_len = 0')
    assert mistakes == [
        'shared/base.toml: [training] steps = "ten": must be an integer',
        "job.toml: [training] seq_len = 0: must be > 0",
    ]


def test_a_mistake_found_later_is_told_with_its_origin(jobs: Jobs) -> None:
    job = load_job(["--job.config_file", jobs.write("[training]\nsteps = 7"), "--optimizer.lr=0.5"])
    mistakes = [
        Violation(("steps",), "must be even; try 8").within("training"),
        Violation(("optimizer.lr",), "must be lower"),
        Violation(("model.name", "training.steps"), "must fit"),
        Violation(("model.name",), "must be another"),
        "of something else",
    ]
    with pytest.raises(ConfigError) as caught, job.wording():
        raise ConfigError(mistakes)
    assert [mistake.split(": must")[0] for mistake in caught.value.mistakes] == [
        "job.toml: [training] steps = 7",
        "command line: --optimizer.lr 0.5",
        "job.toml: [training] steps = 7",
        "default: [model] name",
        "of something else",
    ]


def test_a_circle_is_refused(jobs: Jobs) -> None:
    jobs.write('base = "job.toml"', name="other.toml")
    for base, place in (("other.toml", "other.toml"), ("./job.toml", "job.toml")):
        [mistake] = jobs.mistakes(f'base = "{base}"')
        assert mistake.startswith(f"{place}: base = ")


def test_a_missing_base_is_refused(jobs: Jobs) -> None:
    jobs.write('base = "nope.toml"', name="sub/mid.toml")
    [mistake] = jobs.mistakes('base = "sub/mid.toml"')
    assert mistake.startswith('sub/mid.toml: base = "nope.toml": ')
    assert "sub/nope.toml" in mistake


@pytest.mark.parametrize("base", ["3", '["a.toml", "b.toml"]', '""', "{a = 1}"])
def test_base_is_one_file(jobs: Jobs, base: str) -> None:
    [mistake] = jobs.mistakes(f"base = {base}")
    assert mistake.startswith(f"job.toml: base = {base}: ")


# --- files that cannot be read -----------------------------------------------------------------


@pytest.mark.parametrize(("text", "line"), [("[training]\nsteps = = 5\n", 2), ("[training\n", 1)])
def test_malformed_toml_names_the_line(jobs: Jobs, text: str, line: int) -> None:
    [mistake] = jobs.mistakes(text)
    assert mistake.startswith("job.toml: ")
    assert f"line {line}" in mistake


def test_unreadable_files_are_refused(jobs: Jobs) -> None:
    (jobs.folder / "latin.toml").write_bytes(b"# caf\xe9\n")
    for name in ("latin.toml", "far/away.toml"):
        [mistake] = mistakes_of(lambda name=name: load_config(["--job.config_file", name]))
        assert mistake.startswith(f"command line: --job.config_file {name}: ")


def test_windows_files_load(jobs: Jobs) -> None:
    (jobs.folder / "win.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")
    assert load_config(["--job.config_file", "win.toml"]).training.steps == 3


# --- the way back ------------------------------------------------------------------------------

TEXTS = [
    "plain",
    "with 'single' and \"double\"",
    "back\\slash",
    "line\nbreak\ttab",
    "ü 漢 🙂",
    "#",
    "=",
]


def choices(key: Key) -> list[str]:
    return [name for x in key.metadata if isinstance(x, Rule) for name in x.names]


def random_value(path: Path, facts: Key, rng: random.Random) -> object:
    """A value that the key alone allows."""
    if facts.is_nullable and not facts.is_table and not facts.list_depth and rng.random() < 0.3:
        return None
    if choices(facts):
        choice = rng.choice(choices(facts))
        return (choice,) if facts.list_depth else choice
    if facts.item is bool and not facts.list_depth:
        return rng.random() < 0.5
    if facts.is_table:
        return {key: rng.choice([True, 5, 0.5, *TEXTS]) for key in ("a", "b")[: rng.randrange(3)]}
    if facts.list_depth:
        count = rng.randrange(3)
        if is_dataclass(facts.item):
            return tuple(
                GroupConfig(
                    params=(rng.choice(TEXTS) or "*",), lr=rng.choice([None, 0.5]), weight_decay=0.1
                )
                for _ in range(count)
            )
        if is_custom_object in facts.metadata:
            return tuple({"path": "json:dumps", "a": rng.choice(TEXTS)} for _ in range(count))
        if facts.list_depth == 2 and facts.item is int:
            return tuple((20 * i, 20 * i + rng.randrange(19)) for i in range(count))
        if facts.list_depth == 2:
            return tuple((rng.choice(TEXTS), "norm") for _ in range(count))
        return tuple(
            rng.choice(TEXTS) if facts.item is str else rng.uniform(0.1, 9.0) for _ in range(count)
        )
    if facts.item is int:
        return rng.choice([1, 2, 10**6, rng.randrange(1, 10**12)])
    if facts.item is float:
        below_one = any("<" in x.text for x in facts.metadata if isinstance(x, Rule))
        return rng.choice([rng.random(), 1e-12, 0.5, rng.random() * (1 if below_one else 1e20)])
    return rng.choice(TEXTS)


def random_config(seed: int) -> Config:
    """Some job that keeps the rules across keys and asks for nothing unbuilt."""
    rng = random.Random(seed)
    values = {path: random_value(path, facts, rng) for path, facts in keys(Config).items()}
    paths = values["training", "dataset_path"]
    assert isinstance(paths, tuple)
    num_workers = values["training", "dataloader", "num_workers"]
    assert isinstance(num_workers, int)
    scaling = ("model", "rope_scaling")
    reads = values["checkpoint", "initial_load_path"] is not None
    budget = values["activation_checkpoint", "memory_budget"]
    by_budget = values["activation_checkpoint", "mode"] == "memory_budget"
    values |= {
        ("job", "config_file"): None,
        ("model", "name"): "random:Random",
        ("training", "loss"): "json:dumps",
        ("training", "dataset_options"): {},
        ("validation", "dataset_options"): {},
        ("lr_scheduler", "decay_options"): {},
        ("spikes", "action"): rng.choice(["skip", "clip"]),
        ("spikes", "window"): rng.randrange(4, 1000),
        ("model", "converters"): (),
        ("model", "rope_theta"): rng.choice([None, 1e4, 5e5]),
        (*scaling, "type"): "yarn",
        (*scaling, "factor"): rng.uniform(1.0, 64.0),
        (*scaling, "original_max_position"): 8192,
        (*scaling, "low_freq_factor"): None,
        (*scaling, "high_freq_factor"): None,
        (*scaling, "beta_fast"): rng.uniform(2.0, 64.0),
        (*scaling, "beta_slow"): rng.choice([None, rng.uniform(0.1, 2.0)]),
        ("training", "dataset"): "files" if paths else "synthetic",
        ("training", "dataset_text_template"): None,
        ("training", "dataset_weights"): tuple(rng.uniform(0.1, 9.0) for _ in paths),
        ("training", "global_batch_size"): values["training", "local_batch_size"],
        ("activation_checkpoint", "selective_ac_option"): str(rng.randrange(1, 9)),
        ("activation_checkpoint", "memory_budget"): budget if by_budget else 0.5,
        ("parallelism", "fsdp_reshard_after_forward"): rng.choice(["default", "never"]),
        ("compile", "enable"): by_budget,
        ("compile", "backend"): "inductor",
        ("debug", "deterministic"): True,
        ("checkpoint", "enable"): True,
        ("checkpoint", "mode"): "continue",
        ("checkpoint", "initial_load_model_only"): False,
        ("checkpoint", "initial_load_in_hf"): False,
        ("checkpoint", "initial_load_rope"): "auto",
        ("checkpoint", "load_step"): rng.choice([0, 7, 10**6]) if reads else -1,
        ("router", "bias_update_rate"): 0.0,
        ("lora", "rank"): rng.randrange(1, 99),
        ("checkpoint", "last_save_in_hf"): True,
        ("quantize", "linear", "float8", "recipe_name"): None,
        ("quantize", "linear", "float8", "emulate"): False,
        ("optimizer", "name"): "Muon" if seed % 2 else "SGD",
        ("lr_scheduler", "total_steps"): None,
        ("lr_scheduler", rng.choice(["warmup_steps", "warmup_ratio"])): None,
        ("profiling", "profile_freq"): 10**12,
        ("validation", "enable"): True,
        ("validation", "dataset"): "files" if values["validation", "dataset_path"] else "synthetic",
        ("validation", "steps"): rng.choice([-1, 7]),
        ("validation", "holdout_fraction"): None,
    }
    if seed % 2:
        others = ["momentum"]
    else:
        others = ["beta1", "beta2", "eps", "muon_momentum", "muon_excluded_params"]
    values |= {("optimizer", key): getattr(OptimizerConfig, key) for key in others}
    if rng.random() < 0.5:
        values |= {("validation", "dataset"): None, ("validation", "dataset_path"): ()}
        values["validation", "holdout_fraction"] = rng.uniform(0.001, 0.999)
    if paths and rng.random() < 0.5:
        values |= {("training", "dataset"): "examples", ("training", "dataset_weights"): ()}
        values["training", "attn_mask_type"] = "block_causal"
    else:
        values |= {
            ("training", "chat_template"): None,
            ("training", "packing"): "padded",
            ("training", "long_examples"): "truncate",
            ("training", "special_tokens_in_examples"): "refuse",
        }
        if paths and values["training", "dataset_text_key"] == "text":
            values["training", "dataset_text_template"] = "{title}\n{{é}} {body}"
    for axis in ("tensor", "pipeline", "context"):
        values["parallelism", f"{axis}_parallel_degree"] = 1
    parts: dict[Path, dict[str, object]] = {(): {}}
    parts |= {path: {} for path in sections(Config)}
    for path, value in values.items():
        parts[path[:-1]][path[-1]] = value
    for path in sorted(sections(Config), key=len, reverse=True):
        parts[path[:-1]][path[-1]] = sections(Config)[path](**parts[path])
    return Config(**parts[()])  # type: ignore[arg-type]


@pytest.mark.promise("settings")
@pytest.mark.parametrize("seed", range(60))
def test_resolved_toml_loads_to_an_equal_config(jobs: Jobs, seed: int) -> None:
    config = random_config(seed)
    again = jobs.load(to_toml(config))
    assert replace(again, job=replace(again.job, config_file=None)) == config
    assert to_toml(again) == to_toml(config)
    assert to_toml(jobs.load(to_toml(config, only_changed=True))) == to_toml(config)


@pytest.mark.promise("settings")
@pytest.mark.parametrize("seed", range(20))
def test_options_give_what_the_file_gives(seed: int) -> None:
    config = random_config(seed)
    argv = [
        f"--{'.'.join(path)}={value if isinstance(value, str) else literal(value)}"
        for path, value in values_of(config).items()
    ]
    assert load_config(argv) == config


def test_resolved_toml_names_every_key_but_those_not_set() -> None:
    text = to_toml(Config())
    for path, value in values_of(Config()).items():
        header = f"\n[{'.'.join(path)}]"
        assert f"\n{path[-1]} = " in text or value is None or header in text
    # what not setting them means
    resolved = "[lr_scheduler]\nwarmup_steps = 200\n\n[training]\nsteps = 10000\n"
    assert to_toml(Config(), only_changed=True) == resolved
    assert "config_file" not in text
    # what is left out must come back by itself
    assert all(
        facts.default is None
        for facts in keys(Config).values()
        if facts.is_nullable and not facts.is_table and not facts.list_depth
    )
