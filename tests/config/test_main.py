"""`python -m torchtitan.config`, and the job files that come with the project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.jobs import Jobs
from torchtitan.config.__main__ import main
from torchtitan.config.load import load_config, to_toml

ROOT = Path(__file__).parents[2]
TRAIN_CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))


def test_it_prints_what_loads_again(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.write("[training]\nsteps = 7")
    assert main(["--job.config_file", "job.toml", "--training.seq_len", "64"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    jobs.write(printed.out)
    config = load_config(["--job.config_file", "job.toml"])
    assert (config.training.steps, config.training.seq_len) == (7, 64)
    assert to_toml(config) == printed.out


def test_it_prints_one_line_for_each_mistake(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.write("[training]\nsteps = 'ten'\nstepz = 1")
    assert main(["--job.config_file", "job.toml"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.split(" = ")[0] for line in printed.err.splitlines()] == [
        "job.toml: [training] stepz",
        "job.toml: [training] steps",
    ]


def test_the_command_needs_no_torch_and_exits_by_code(tmp_path: Path) -> None:
    script = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None\n"  # importing it would now fail
        "runpy.run_module('torchtitan.config', run_name='__main__', alter_sys=True)"
    )

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    good = run("--training.seed", "3")
    assert good.returncode == 0
    assert "seed = 3" in good.stdout
    assert (
        good.stderr
        == "command line: --training.seed is torchtitan's name; here it is --debug.seed\n"
    )
    bad = run("--job.config_file", str(tmp_path / "none.toml"))
    assert bad.returncode == 2
    assert bad.stderr.startswith("command line: --job.config_file ")
    assert "Traceback" not in bad.stderr


def test_there_are_job_files() -> None:
    names = {path.stem for path in TRAIN_CONFIGS}
    sizes = {"1b", "3b", "8b", "70b", "405b"}
    assert names >= {"debug_model", *(f"llama3_{size}" for size in sizes)}


@pytest.mark.parametrize("path", TRAIN_CONFIGS, ids=lambda path: path.stem)
def test_every_job_file_loads_without_old_names(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(["--job.config_file", str(path)])
    assert not caplog.messages
    assert config.job.dump_folder == f"./outputs/{path.stem}"
    if path.stem.startswith("llama3_"):
        assert config.model.flavor == path.stem.split("_")[1].upper()
        assert config.training.dataset == "files"
