"""What `explain` says, against the log of samples, the files' bytes and itself backwards."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.tools.explain.campaign import (
    LAYOUTS,
    SETTINGS,
    SMALL,
    compare,
    drive,
    read_log,
    stretch_of,
    write_data,
)
from torchtitan.data.sampler import Inverse, Mixture, Permutation
from torchtitan.job import load_config
from torchtitan.tools.explain.command import explain_document, explain_step, main
from torchtitan.tools.explain.documents import RunData
from torchtitan.tools.explain.steps import read_history

CACHE, CONFIG = "--training.dataset_cache=cache", "--job.config_file=run/config.toml"
CP = "--parallelism.context_parallel_degree=2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(autouse=True)
def workplace(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the settings are relative, so that they are the same for every test."""
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.promise("tools")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mixed", "dp 2, cp 2"),
        ("split", "pp 2, dp 2"),
        ("packed", "dp 2, cp 2"),
        ("gaps", "one device"),
        ("padded", "pp 2, dp 2"),
    ],
)
def test_40_steps_are_explained_as_they_were_logged(kind: str, layout: str) -> None:
    world, degrees = LAYOUTS[layout]
    drive(Path("run"), [*SETTINGS[kind], *degrees, CACHE], world=world, steps=40)
    num_samples, num_parts = compare(Path("run"))
    assert num_samples == 40 * 8
    assert num_parts > num_samples or kind == "padded"


@pytest.mark.promise("tools")
@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_steps_of_each_document_are_those_that_have_it(kind: str) -> None:
    drive(Path("run"), [*SETTINGS[kind], CACHE], world=2, steps=60)
    [stretch], data = read_history(Path("run")), RunData(load_config([CONFIG]))
    visits = defaultdict(list)
    for step in range(1, 61):
        for k, parts in explain_step(stretch, step, data=data).items():
            for name, span in parts:
                visits[name].append((step, k, span))
    assert any(len({step for step, *_ in seen}) > 1 for seen in visits.values())
    for name, expected in sorted(visits.items())[:: len(visits) // 8]:
        assert explain_document([stretch], name, data=data) == expected


@pytest.mark.parametrize("kind", ["mixed", "split", "packed"])
@pytest.mark.long
def test_a_real_run_that_goes_on_in_another_layout_with_another_batch(
    kind: str, ranks: RankPool, tmp_path: Path
) -> None:
    # the ranks have another current folder
    there = [re.sub('"(?=[a-z])', f'"{tmp_path}/', part) for part in SETTINGS[kind]]
    job = [*SMALL, *there, f"--training.dataset_cache={tmp_path}/cache"]
    job += [f"--job.dump_folder={tmp_path}/run"]
    job += ["--checkpoint.enable", "--activation_checkpoint.mode=none"]
    job += ["--training.mixed_precision_param=float32", "--lr_scheduler.total_steps=20"]
    ranks.run(jobs.train, [*job, "--training.steps=3"], world=2)
    later = [CP, "--training.global_batch_size=12", "--checkpoint.mode=continue"]
    later += ["--training.skip_samples", "5-9", "30-40"]
    ranks.run(jobs.train, [*job, *later, "--training.steps=5"], world=2)
    run = tmp_path / "run"
    compare(run)
    logged = read_log(run)
    assert [len(logged[step]) for step in range(1, 6)] == [8, 8, 8, 12, 12]
    assert {rank for _, _, rank, _ in logged[1]} == {0, 1}
    numbers = sorted(number for step in logged.values() for number, *_ in step)
    assert numbers == [*range(30), *range(41, 59)]
    assert {rank for _, _, rank, _ in logged[5]} == {0}
    assert [one.origin.partition(",")[0] for one in read_history(run)] == ["step-3", "step-5"]
    # without the first checkpoint its steps cannot be known for sure, and that is said
    shutil.rmtree(run / "checkpoint" / "step-3")
    last = stretch_of(run, 5)
    assert "batch changed" in last.doubt
    assert last.samples(5) == sorted(n for n, *_ in logged[5])


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    drive(Path("run"), [*SETTINGS["mixed"], CACHE], world=2, steps=4)
    assert main(["run", "--step", "2", "--text"]) == 0
    told = capsys.readouterr().out
    logged = read_log(Path("run"))[2]
    assert all(
        f"sample {n}  rank {rank}  " in told and digest in told for n, digest, rank, _ in logged
    )
    [name] = re.findall(rf"sample {min(logged)[0]} .*\n  (.*): tokens", told)
    where = name.replace(" line ", ":").replace(" item ", ":").replace(" document ", ":")
    assert main(["run", "--document", where]) == 0
    assert f"step 2  sample {min(logged)[0]}  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--step", "1"], "nowhere/config.toml"),
        (["run", "--step", "5"], "5"),
        (["run", "--document", "a.jsonl:9999"], "'a.jsonl line "),
        (["run", "--step", "0"], "0"),
        (["run", "--document", "a.jsonl", "--text"], "--text"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    drive(Path("run"), [*SETTINGS["mixed"], CACHE], world=1, steps=4)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_stored_settings_name_no_host_and_no_folder_that_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    drive(Path("run"), [*SETTINGS["split"], CACHE], world=1, steps=4)
    stored = Path("run") / "config.toml"
    text = stored.read_text().replace('dataset_cache = "cache"', 'dataset_cache = "elsewhere"')
    stored.write_text(text)
    assert main(["run", "--step", "1"]) == 0
    assert "elsewhere" in text
    assert not Path("elsewhere").exists()
    url = 'dataset_path = ["http://127.0.0.1:9/a.jsonl"]'
    stored.write_text(re.sub(r"dataset_path = \[[^]]+\]", url, text))
    assert main(["run", "--step", "1"]) == 2
    assert "--fetch" in capsys.readouterr().err
    assert main(["run", "--step", "1", "--fetch"]) == 2
    assert "127.0.0.1" in capsys.readouterr().err


def test_data_that_changed_since_the_checkpoint_are_refused(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = jobs.write_job(tmp_path)
    text = tmp_path / "changing.txt"
    text.write_text("some words " * 200)
    job += ["--training.dataset=files", f"--training.dataset_path={text}", "--training.steps=1"]
    ranks.run(jobs.train, job, world=1)
    assert main([f"{tmp_path}/run", "--step", "1"]) == 0
    text.write_text("other words " * 200)
    assert main([f"{tmp_path}/run", "--step", "1"]) == 2
    assert "data changed" in capsys.readouterr().err


def test_the_order_backwards() -> None:
    for n in (1, 2, 17, 1000):
        order, back = (kind(n, seed=3, epoch=2, source=1) for kind in (Permutation, Inverse))
        assert [back[order[i]] for i in range(n)] == list(range(n))
    mixture = Mixture([0.7, 0.2, 0.1])
    assert [mixture.number_of(mixture[k]) for k in range(300)] == list(range(300))
