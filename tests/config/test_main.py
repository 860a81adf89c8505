"""`python -m torchtitan config`, and the job files that come with the project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.jobs import Jobs
from torchtitan.config.settings import to_toml
from torchtitan.job import load_config
from torchtitan.tools.config import main

ULYSSES = "--parallelism.context_parallel_rotate_method=ulysses"
FLOAT8 = ("--model.converters=float8", "--quantize.linear.float8.recipe_name=rowwise")
ROOT = Path(__file__).parents[2]
TRAIN_CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))
TO_BE_GIVEN = {
    "finetune_hf": ("--checkpoint.initial_load_path=base", "--training.dataset_path=chats.jsonl")
}


@pytest.mark.promise("settings")
def test_it_prints_what_loads_again(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.write("[training]\nsteps = 7")
    assert main(["--job.config_file", "job.toml", "--training.seq_len", "64"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    jobs.write(printed.out)
    config = load_config(["--job.config_file", "job.toml"])
    assert (config.training.steps, config.training.seq_len) == (7, 64)
    assert printed.out.startswith(to_toml(config))
    sizes = printed.out.removeprefix(to_toml(config)).strip().splitlines()
    assert len(sizes) > 1
    assert all(line.startswith("# ") and len(line) <= 100 for line in sizes)
    shown = " ".join(line.removeprefix("# ") for line in sizes)
    assert shown.startswith("llama3 debugmodel: dim 256, num_layers 6, num_heads 16, ")
    assert "tie_embeddings false" in shown
    assert re.search(r", rope_scaling llama3: [0-9,]+ parameters\Z", shown)


def test_a_name_of_torchtitan_is_accepted_and_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--training.seed", "3"]) == 0
    assert "seed = 3" in capsys.readouterr().out
    assert caplog.messages == [
        "command line: --training.seed 3: is torchtitan's name; here it is --debug.seed"
    ]


@pytest.mark.promise("mistakes")
@pytest.mark.slow
def test_mistakes_in_settings_are_told_without_torch_and_the_command_exits_by_code(
    tmp_path: Path,
) -> None:
    script = (
        "import runpy, sys\nsys.modules['torch'] = None\n"  # importing it would now fail
        "sys.argv.insert(1, 'config'); runpy.run_module('torchtitan', run_name='__main__')"
    )
    bad = subprocess.run(
        [sys.executable, "-c", script, "--job.config_file", str(tmp_path / "none.toml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 2
    assert bad.stderr.startswith("command line: --job.config_file ")
    assert "Traceback" not in bad.stderr


SMALL = ("--model.flavor=tiny8", "--model.tokenizer_path=byte")
CONTINUE = (
    "--checkpoint.enable",
    "--checkpoint.mode=continue",
    "--checkpoint.initial_load_path=x",
    "--checkpoint.initial_load_model_only=false",
    "--checkpoint.exclude_from_loading",
)
FEW_TOKENS = ("--training.seq_len=32", "--training.local_batch_size=4")


def checked(*options: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([*SMALL, *FEW_TOKENS, *options])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.promise("mistakes")
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--parallelism.fsdp_reshard_after_forward=0"], ["command line: ", "positive integer"]),
        (["--model.name=lama3"], ["--model.name", "'lama3'", "did you mean 'llama3'?"]),
        (["--model.flavor=8b"], ["--model.flavor", "'8b'", "did you mean '8B'?"]),
        (["--world_size=0"], ["--world_size", "1 or more", "'0'"]),
        (["--world_size", "two"], ["--world_size", "'two'"]),
        (["--world_size=6", "--parallelism.tensor_parallel_degree=4"], ["got 4 (", "6 ranks"]),
        (
            ["--world_size=4", "--parallelism.data_parallel_shard_degree=2"],
            ["got 2 (", "for 4 ranks"],
        ),
        (
            ["--parallelism.tensor_parallel_degree=3", "--training.seq_len=36"],
            ["num_heads 8", "split by 1, 2, 4"],
        ),
        (["--parallelism.context_parallel_degree=8", ULYSSES], ["4 key/value heads"]),
        (["--parallelism.pipeline_parallel_degree=11"], ["got 11", "to at most 10"]),
        (["--parallelism.pipeline_parallel_degree=8"], ["microbatch", "got 4"]),
        (
            ["--training.global_batch_size=12", "--parallelism.data_parallel_replicate_degree=2"],
            ["--training.global_batch_size", "4 x 2 = 8, got 12"],
        ),
        (["--world_size=2", "--training.global_batch_size=12"], ["4 x 2 = 8, got 12"]),
        (
            ["--parallelism.fsdp_reshard_after_forward=3", "--world_size=8"],
            ["the 8 ranks", "got 3"],
        ),
        (
            ["--optimizer.frozen_params=layer.*"],
            ["--optimizer.frozen_params", "'layer.*'", "similar are"],
        ),
        (
            ["--optimizer.no_decay_params=*nrom*"],
            ["--optimizer.no_decay_params", "'*nrom*'", "similar are"],
        ),
        (["--model.tokenizer_path=bpe_2048"], ["2048 ids", "264"]),
        (["--lora.rank=2", "--lora.modules=*.wx"], ["--lora.modules", "'*.wx'"]),
        ([*FLOAT8, "--quantize.linear.float8.filter_fqns=outptu"], ["filter_fqns", '"outptu"']),
        (["--model.converters=float8,flot8"], ["--model.converters", "did you mean 'float8'?"]),
        (
            [
                "--parallelism.tensor_parallel_degree=3",
                "--training.seq_len=36",
                "--parallelism.pipeline_parallel_degree=11",
                "--parallelism.fsdp_reshard_after_forward=4",
                "--world_size=33",
            ],
            ["num_heads", "pipeline_parallel_degree", "fsdp_reshard_after_forward"],
        ),
    ],
)
def test_it_refuses_what_a_start_would(
    options: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = checked(*options, capsys=capsys)
    assert (code, out) == (2, "")
    assert all(part in err for part in parts), err


@pytest.mark.promise("mistakes")
@pytest.mark.parametrize(
    "options",
    [
        ["--world_size=8", "--parallelism.tensor_parallel_degree=2"],
        ["--world_size", "16", "--training.global_batch_size=64"],
        # no number of ranks: with enough of them each of these starts
        ["--parallelism.fsdp_reshard_after_forward=4"],
        ["--parallelism.fsdp_reshard_after_forward=4", "--parallelism.context_parallel_degree=2"],
        ["--parallelism.data_parallel_replicate_degree=4", "--training.global_batch_size=32"],
        ["--parallelism.pipeline_parallel_degree=4", "--parallelism.fsdp_reshard_after_forward=1"],
        ["--parallelism.data_parallel_shard_degree=64"],
        ["--compile.enable", "--compile.components=loss,model"],
        [*CONTINUE, "optimizer,output.weight,optimizer.norm.*"],
        [*CONTINUE, "*.lora_?", "--lora.rank=2"],
        # of the job's machines
        ["--model.tokenizer_path=/data/no/such/tokenizer.json"],
    ],
)
def test_it_takes_what_would_start(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = checked(*options, capsys=capsys)
    assert (code, err) == (0, "")
    assert "world_size" not in out


def test_what_this_machine_lacks_is_a_remark(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    code, out, _ = checked(*FLOAT8, "--model.flavor=debugmodel", capsys=capsys)
    assert code == 0
    assert 'converters = [\n    "float8",' in out
    # with torchao installed it lacks the GPU, otherwise the package
    (remark,) = [message for name, _, message in caplog.record_tuples if "torchtitan" in name]
    assert "float8" in remark
    assert checked("--compile.enable", "--compile.backend=theirs", capsys=capsys)[0] == 0
    assert "got 'theirs'" in caplog.text


def test_there_are_job_files() -> None:
    names = {path.stem for path in TRAIN_CONFIGS}
    sizes = {"1b", "3b", "8b", "70b", "405b"}
    assert names >= {"debug_model", *(f"llama3_{size}" for size in sizes)}


@pytest.mark.promise("settings")
@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_every_job_file_loads_without_old_names(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(["--job.config_file", str(path), *TO_BE_GIVEN.get(path.stem, ())])
    assert not caplog.messages
    assert config.job.dump_folder == f"./outputs/{path.stem}"
    if path.stem == "finetune_hf":
        assert (config.model.flavor, config.model.tokenizer_path) == ("hf", "base")
        words = ["--job.config_file", str(path), *TO_BE_GIVEN[path.stem]]
        config = load_config([*words, "--checkpoint.enable", "false"])
        assert (config.model.flavor, config.model.tokenizer_path) == ("hf", "base")
        keys = ("keep_best", "last_save_in_hf")
        noticed = [key for key in keys if key in caplog.text]
        assert (len(caplog.messages), len(noticed)) == (2, 2)
    if path.stem.startswith("llama3_"):
        assert config.model.flavor == path.stem.split("_")[1].upper()
        assert config.training.dataset == "files"
