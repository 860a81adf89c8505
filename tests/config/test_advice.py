"""What the table of torchtitan's names advises: every name exists, and a job that follows it is
accepted by `config`, which checks what a start would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.config.jobs import loaded
from torchtitan.__main__ import main as run
from torchtitan.config.schema import keys
from torchtitan.config.sources import parse
from torchtitan.job import Config
from torchtitan.models.families import MODELS
from torchtitan.tools.config import main

ROOT = Path(__file__).parents[2]
FILE = ROOT / "torchtitan/torchtitan_0_2.toml"
TABLE: Any = parse(FILE.read_text("utf-8"), origin=FILE.name)
FEATURES: Any = TABLE["features"]
OWN = """
[training]
dataset = "examples.own_dataset:Sums"
loss = "examples.own_hooks:smoothed"
callbacks = [{path = "examples.own_hooks:StopEarly", patience = 2}]
[optimizer]
name = "examples.own_optimizer:Lion"
[lr_scheduler]
decay_type = "examples.own_hooks:quadratic"
[metrics]
sinks = ["examples.own_hooks:CsvSink"]
"""
STAGES = """
[parallelism]
pipeline_parallel_degree = 2
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3",
    "layers.4", "layers.5", "norm", "output"]]
"""
MOE = '[model]\nname = "qwen3_moe"\nflavor = "tiny"\ntokenizer_path = "byte"\n'
FLOAT8 = '[training]\nmixed_precision_param = "bfloat16"\n[model]\nconverters = ["float8"]'
FILES = '[training]\ndataset = "files"\ndataset_path = "texts.jsonl"'
# of each feature a job that is refused, and jobs that do what is advised; "" is a removed line
FOLLOWED: dict[str, tuple[str, list[str]]] = {
    "plugin": ('[experimental]\ncustom_import = "own"', [OWN]),
    "other_config_file": ('[job]\nsave_config_file = "own.toml"', [""]),
    "converted_model": ("[model]\nprint_after_conversion = true", [""]),
    "step_in_backward": ("[optimizer]\nearly_step_in_backward = true", [""]),
    "leaked_cycles": ("[training]\ngc_debug = true", ["[training]\ngc_freq = 5"]),
    "async_tensor": (
        "[parallelism]\nenable_async_tensor_parallel = true\ntensor_parallel_degree = 2",
        ["[parallelism]\ntensor_parallel_degree = 2"],
    ),
    "split_points": (
        STAGES + 'pipeline_parallel_split_points = ["layers.1"]',
        [STAGES],
    ),
    "split_experts": (
        "[parallelism]\nexpert_tensor_parallel_degree = 2",
        [f"{MOE}[parallelism]\nexpert_parallel_degree = 2"],
    ),
    "expert_exchange": (
        '[parallelism]\nexpert_parallel_degree = 2\nexpert_parallel_comm_backend = "deepep"',
        [f"{MOE}[parallelism]\nexpert_parallel_degree = 2"],
    ),
    "quantized_experts": ('[model]\nconverters = ["quantize.grouped_mm.mx"]', [FLOAT8]),
    "forced_balance": (
        "[debug]\nmoe_force_load_balance = true",
        [f"{MOE}expert_bias = true\n[router]\nbias_update_rate = 1e-3"],
    ),
    "moe": (
        '[model]\nname = "llama4"',
        [MOE, MOE.replace("qwen3_moe", "deepseek_v3")],
    ),
    "compiled_autograd": (
        "[parallelism]\nenable_compiled_autograd = true",
        ["[compile]\nenable = true"],
    ),
    "load_only": (
        "[checkpoint]\nload_only = true",
        [
            '[job]\ndump_folder = "other"\n[checkpoint]\nenable = true\n'
            'initial_load_path = "run/checkpoint/step-5"\ninitial_load_model_only = false'
        ],
    ),
    "wait_seconds": ("[elastic]\nwait_seconds = 60", [""]),
    "upload_check": ('[checkpoint]\nenable = true\nupload_check = "read_back"', [""]),
    "num_microbatches": (
        STAGES + "pipeline_parallel_num_microbatches = 4\n[training]\nlocal_batch_size = 8",
        [STAGES + "pipeline_parallel_microbatch_size = 2\n[training]\nlocal_batch_size = 8"],
    ),
    "seed_checkpoint": ("[checkpoint]\ncreate_seed_checkpoint = true", [""]),
    "torchft": (
        "[fault_tolerance]\nenable = true",
        ["[checkpoint]\nenable = true\ninterval = 10"],
    ),
    "recompute_by_name": (
        "[activation_checkpoint]\nper_op_sac_force_recompute_mm_shapes_by_fqns = []",
        ['[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"'],
    ),
    "curve_of_budgets": ("[activation_checkpoint]\nvisualize_memory_budget_pareto = true", [""]),
    "other_recomputation": (
        "[activation_checkpoint]\nearly_stop = true",
        [
            *(f'[activation_checkpoint]\nmode = "{mode}"' for mode in ("none", "full")),
            '[activation_checkpoint]\nmode = "memory_budget"\n[compile]\nenable = true',
        ],
    ),
    "compiled_loss": (
        '[compile]\nenable = true\ncomponents = ["loss"]',
        ['[compile]\nenable = true\ncomponents = ["model"]'],
    ),
    "float8_gather": (
        f"{FLOAT8}\n[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true",
        [FLOAT8],
    ),
    "float8_recompute": (
        f"{FLOAT8}\n[float8]\nforce_recompute_fp8_weight_in_bwd = true",
        [f'{FLOAT8}\n[activation_checkpoint]\nmode = "full"'],
    ),
    "mx": ('[model]\nconverters = ["mx"]', [FLOAT8, FLOAT8.partition("[model]")[0]]),
    "fake_process_groups": ('[comm]\nmode = "fake_backend"', [""]),
    "memory_estimation": ("[memory_estimation]\nenable = true", [""]),
    "flux": ('[model]\nname = "flux"', [""]),
    "other_model": (
        '[model]\nname = "vlm"',
        [f'[model]\nname = "{name}"\nflavor = "tiny"\ntokenizer_path = "byte"' for name in MODELS],
    ),
    "same_model": ('[model]\nname = "llama3_ft"', ['[model]\nname = "llama3"']),
    "same_deepseek": (
        '[model]\nname = "simple_fsdp.deepseek_v3"',
        ['[model]\nname = "deepseek_v3"\nflavor = "tiny"\ntokenizer_path = "byte"'],
    ),
    "c4": ('[training]\ndataset = "c4"', ['[training]\ndataset = "python_stdlib"', FILES]),
    "c4_validation": (
        '[validation]\nenable = true\ndataset = "c4_validation"',
        [
            "[validation]\nenable = true\nholdout_fraction = 0.05",
            FILES.replace("[training]", "[validation]\nenable = true"),
        ],
    ),
}
TAKEN = {  # every value
    "schedule_file": '[parallelism]\npipeline_parallel_schedule_csv = ""',
    "attention_of_debugmodel": '[model]\nflavor = "debugmodel_flex_attn"',
    "attention_of_8B": '[model]\nflavor = "8B_flex"',
    "mark_of_its_own_tests": "[job]\nuse_for_integration_test = true",
    "overlapped_exchange": "[parallelism]\npipeline_parallel_expert_parallel_overlap = false",
    "quantized_weights": '[checkpoint]\nenable = true\ninitial_load_path = "hf"\n'
    "initial_load_in_hf = true\ninitial_load_in_hf_quantized = true",
}


def test_every_feature_is_followed() -> None:
    assert {*FOLLOWED, *TAKEN} == {*FEATURES}


@pytest.mark.parametrize("feature", FOLLOWED)
def test_what_is_advised_is_accepted(
    feature: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused, followed = FOLLOWED[feature]
    [mistake] = loaded(refused).mistakes
    assert FEATURES[feature]["instead"] in mistake
    for text in followed:
        (tmp_path / "job.toml").write_text(text)
        assert main(["--job.config_file", str(tmp_path / "job.toml")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("feature", TAKEN)
def test_what_asks_for_nothing_is_taken(feature: str) -> None:
    assert not loaded(TAKEN[feature]).mistakes


COMMAND = re.compile(r"python -m torchtitan ([a-z]+)( [a-z]+(?= -|$))?((?: --[\w.]+ \w+)*)")
DOTTED = re.compile(r"(?<![\w.\"])(?!torchtitan)[a-z]\w*(?:\.\w+)+(?![\w:])")
ADVICE = [feature["instead"] for feature in FEATURES.values()]
ADVICE += [default["meaning"] for default in TABLE["other_defaults"].values()]


@pytest.mark.parametrize("advice", [*dict.fromkeys(ADVICE)])
def test_every_name_of_an_advice_exists(advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours = keys(Config).keys()
    for verb, subject, options in COMMAND.findall(advice):
        with pytest.raises(SystemExit):
            run([verb, *subject.split(), "--help"])
        printed = capsys.readouterr().out
        names = [name for name in re.findall(r"--(\w[\w.]*)", options) if "." not in name]
        assert all(f"--{name}" in printed for name in names), options
    for name in DOTTED.findall(advice):
        assert tuple(name.split(".")) in ours, name
    for section, name in re.findall(r"\[([a-z_.]+)\] ([a-z_]+)", advice):
        assert (*section.split("."), name) in ours
    for name in re.findall(r"([a-z_]+) = ", advice):
        assert name in {path[-1] for path in ours}


def test_every_built_model_is_named() -> None:
    named = re.findall(
        r"[a-z]+\d?(?:_\w+)?", FEATURES["other_model"]["instead"].partition("use ")[2]
    )
    assert {*named} - {"or"} == {*MODELS}
