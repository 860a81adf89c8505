"""`torchtitan config`, and the job files that come with the project."""

from __future__ import annotations

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
TO_BE_GIVEN = dict.fromkeys(
    ("finetune_hf", "finetune_dpo"),
    ("--checkpoint.initial_load_path=base", "--training.dataset_path=chats.jsonl"),
)


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
    assert bad.stderr.startswith("error: command line: --job.config_file ")
    assert "Traceback" not in bad.stderr


SMALL = ("--model.flavor=tiny8", "--model.tokenizer_path=byte")
FEW_TOKENS = ("--training.seq_len=32", "--training.local_batch_size=4")


def checked(*options: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([*SMALL, *FEW_TOKENS, *options])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.promise("mistakes")
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--model.name=lama3"], ["--model.name", "'lama3'", "did you mean 'llama3'?"]),
        (["--world_size=6", "--parallelism.tensor_parallel_degree=4"], ["got 4 (", "6 ranks"]),
        (
            ["--parallelism.tensor_parallel_degree=3", "--training.seq_len=36"],
            ["num_heads 8", "split by 1, 2, 4"],
        ),
        (["--parallelism.context_parallel_degree=8", ULYSSES], ["4 key/value heads"]),
        (
            ["--training.global_batch_size=12", "--parallelism.data_parallel_replicate_degree=2"],
            ["--training.global_batch_size", "4 x 2 = 8, got 12"],
        ),
        (
            ["--optimizer.frozen_params=layer.*"],
            ["--optimizer.frozen_params", "'layer.*'", "similar are"],
        ),
        (["--model.tokenizer_path=bpe_2048"], ["2048 ids", "264"]),
        (["--lora.rank=2", "--lora.modules=*.wx"], ["--lora.modules", "'*.wx'"]),
        ([*FLOAT8, "--quantize.linear.float8.filter_fqns=outptu"], ["filter_fqns", '"outptu"']),
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
        ["--parallelism.fsdp_reshard_after_forward=4", "--parallelism.context_parallel_degree=2"],
        ["--parallelism.data_parallel_replicate_degree=4", "--training.global_batch_size=32"],
        ["--parallelism.data_parallel_shard_degree=64"],
        # of the job's machines
        ["--model.tokenizer_path=/data/no/such/tokenizer.json"],
    ],
)
def test_it_takes_what_would_start(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = checked(*options, capsys=capsys)
    assert (code, err) == (0, "")
    assert "world_size" not in out


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
