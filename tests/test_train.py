"""The commands as a user starts them: exit codes, messages, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed.jobs import listening, places_of_ranks, read_rows, write_job
from tests.distributed.jobs import train as jobs_train
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY
from tests.naming import naming
from tests.test_two_runs import code_of
from torchtitan.base.errors import ConfigError
from torchtitan.base.files import refuse_links
from torchtitan.job import load_config, written_names

pytestmark = pytest.mark.usefixtures("warm_starts")

ROOT = Path(__file__).parent.parent
COLD_PYTHON = sys.executable  # before `warm_starts`


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def train(*arguments: str, ranks: int = 1, **environ: str) -> subprocess.CompletedProcess[str]:
    launcher = (
        ["-m", "torchtitan.launch", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    return run([sys.executable, *launcher, "-m", "torchtitan.train", *arguments], **environ)


@pytest.mark.promise("no-code-from-data")
@pytest.mark.slow
@pytest.mark.parametrize("module", ["torchtitan train", "torchtitan.train"])
def test_a_folder_from_elsewhere_is_not_imported_from(module: str, tmp_path: Path) -> None:
    """A module form of the command runs no numpy.py of the current folder, and finds own code."""
    for name in ("numpy", "torch"):
        (tmp_path / f"{name}.py").write_text("open('evil', 'w')")
    (tmp_path / "own.py").write_text("class Data:\n    pass\n")
    settings = ["--training.dataset=own:Data", "--training.steps=0"]
    done = subprocess.run(
        [COLD_PYTHON, "-m", *module.split(), *settings],
        **{"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "check": False},
        **{"capture_output": True, "text": True},
    )
    assert done.returncode == 2
    assert "own:Data" in done.stderr
    assert "No module" not in done.stderr
    assert not (tmp_path / "evil").exists()


@pytest.mark.promise("no-code-from-data")
@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no PYTHONSAFEPATH")
def test_workers_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    job = [*write_job(tmp_path), "--training.dataloader.num_workers=1", "--training.steps=1"]
    for name in ("json", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'evil')!r}, 'w')")
    done = subprocess.run(
        [COLD_PYTHON, "-m", "torchtitan", "train", *job],
        **{"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "check": False},
        **{"capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "evil").exists()


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-"])
def test_a_closed_stream_ends_no_run(closed: str, tmp_path: Path) -> None:
    command = shlex.join(
        [COLD_PYTHON, "-m", "torchtitan", "train", *write_job(tmp_path), "--training.steps=2"]
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(f"{command} {closed}", shell=True, env=environment, check=False)
    assert done.returncode == 0
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [1, 2]
    assert "step" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.promise("last-stage-loss")
@pytest.mark.slow
def test_two_ranks_show_the_picked_one_and_log_both(tmp_path: Path) -> None:
    done = train(*write_job(tmp_path), "--training.steps=2", ranks=2, LOG_RANK="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step:      2/2") == 1
    for rank in (0, 1):
        assert "step:      2" in (tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text()


def train_listening(job: list[str]) -> list[str]:
    """Train on this rank; return what it logged."""
    with listening() as lines:
        jobs_train(job)
    return lines


@pytest.fixture(scope="module")
def losses(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one device."""
    folder = tmp_path_factory.mktemp("alone")
    job = [*write_job(folder), "--model.flavor=tiny8", "--training.steps=2"]
    ranks.run(jobs_train, job, world=1)
    return [row["loss"] for row in read_rows(folder / "run")]


@pytest.mark.promise("last-stage-loss")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_shows_its_loss_on_every_rank_wherever_the_last_stage_is(
    schedule: str, losses: list[float], ranks: RankPool, tmp_path: Path
) -> None:
    job = [
        *write_job(tmp_path),
        "--model.flavor=tiny8",
        "--parallelism.pipeline_parallel_degree=2",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        "--training.local_batch_size=4",
        "--training.steps=2",
        "--metrics.enable_tensorboard",
        "--metrics.save_for_all_ranks",
    ]
    names = ("metrics.jsonl", "metrics.rank_1.jsonl")
    logs = ranks.run(train_listening, job, world=2)
    for rank, (name, log) in enumerate(zip(names, logs, strict=True)):
        shown = [float(loss) for line in log for loss in re.findall(r"loss: +([\d.]+)", line)]
        assert shown == pytest.approx(losses, abs=1e-4)
        lines = (tmp_path / "run" / name).read_text().splitlines()
        assert [json.loads(line)["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
        events = EventAccumulator(str(tmp_path / "run" / "tb" / "run" / f"rank_{rank}"))
        events.Reload()
        for tag in ("global_avg_loss", "global_max_loss"):
            values = [event.value for event in events.Scalars(f"loss_metrics/{tag}")]
            assert values == pytest.approx(losses, rel=1e-5)


@pytest.mark.promise("exit-codes", "mistakes")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job.config_file=nowhere.toml"], "nowhere.toml"),
        (["--parallelism.data_parallel_shard_degree=4"], "start NGPU=4 ranks"),
        (["--model.flavor=9B"], "--model.flavor 9B: must be one of tiny, tiny8, narrow"),
        (["--training.dataset=files", "--training.dataset_path=no/*.txt"], "no/*.txt"),
        (["--job.dump_folder=/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_a_mistake_ends_in_its_message_and_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of([*write_job(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.promise("exit-codes")
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--training.dataset=tests.own_faults:Exits"],
        ["--training.dataset=tests.own_faults:Interrupts", "--training.dataloader.num_workers=1"],
        ["--metrics.sinks=tests.own_faults:ExitingSink"],
    ],
)
def test_own_code_does_not_end_a_run_as_if_it_were_done(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of([*write_job(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert "own_faults.py" in said
    assert "SystemExit" in said or "KeyboardInterrupt" in said


@pytest.mark.promise("mistakes")
@pytest.mark.slow
def test_a_mistake_that_every_rank_meets_is_said_once(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    for arguments, message in (
        (["--training.stepz=3"], "--training.stepz 3"),
        (["--training.global_batch_size=6"], "must be a multiple of local_batch_size"),
        (["--training.attention_kernel=flash"], "--training.attention_kernel flash"),
    ):
        done = train(*job, *arguments, ranks=2)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count(message) == 1
        assert "Traceback" not in done.stderr


@pytest.mark.promise("not-finite", "exit-codes")
@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_in_code_3(tmp_path: Path) -> None:
    done = train(*write_job(tmp_path), "--optimizer.lr=1e30", ranks=2)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("must have a finite loss and gradient norm") == 1
    for rank in (0, 1):
        log = (tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text()
        assert log.count("must have a finite loss and gradient norm") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.promise("readme")
@pytest.mark.slow
def test_run_train_uses_the_given_file_and_ranks(tmp_path: Path) -> None:
    arguments = write_job(tmp_path, TINY)
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CONFIG_FILE": str(tmp_path / "run.toml"),
        "NGPU": "2",
    }
    command = ["bash", str(ROOT / "run_train.sh"), *arguments[1:], "--training.steps=2"]
    done = run(command, **environ)
    assert done.returncode == 0, done.stderr
    assert "layout: dp_shard 2" in done.stderr
    assert "step 1 of 2" in done.stderr
    assert len(read_rows(tmp_path / "run")) == 2


PATCHED = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from torchtitan.base.errors import CheckpointError, NonFiniteError

train = import_module("torchtitan.train")

def hang_and_fail(self, on_step):
    ThreadPoolExecutor().submit(time.sleep, 1000)  # as a save does whose peer hangs
    raise RuntimeError("a peer gives no answer")

def meet_nan(self, on_step):
    raise NonFiniteError("step 3 must have a finite loss")

def fail_to_save(self):
    raise CheckpointError("the disk is gone")

if sys.argv[1] == "hang":
    train.Trainer.train = hang_and_fail
else:
    train.Trainer.train, train.Trainer.close = meet_nan, fail_to_save
train.main_and_exit(sys.argv[2:])
"""


MANY_STEPS = ("--training.steps=1000000", "--lr_scheduler.total_steps=1000000")


@pytest.mark.promise("exit-codes")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "code", "message", "times"),
    [
        ("--training.global_batch_size=6", 2, "must be a multiple of local_batch_size", 2),
        ("--job.time_limit_seconds=1", 4, "by its deadline", 1),
    ],
)
def test_ranks_without_a_launcher_end_with_one_code(
    argument: str, code: int, message: str, times: int, tmp_path: Path
) -> None:
    """No launcher ends the other rank: it reports a mistake of its own."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "torchtitan.train", *write_job(tmp_path), *MANY_STEPS, argument],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **place},
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places_of_ranks(2)
    ]
    said = [rank.communicate(timeout=150)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, code], said
    assert "Traceback" not in "".join(said)
    assert [message in text for text in said].count(True) == times


@pytest.mark.promise("exit-codes")
def test_a_fault_ends_the_process_though_a_save_hangs(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", PATCHED, "hang", *write_job(tmp_path)])
    assert done.returncode == 1
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    for text in (done.stderr, log):
        assert text.count("RuntimeError: a peer gives no answer") == 1
        assert "Traceback" in text


@pytest.mark.promise("exit-codes")
def test_a_failed_save_does_not_hide_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", PATCHED, "nan", *write_job(tmp_path)])
    assert done.returncode == 3
    assert re.search(r"step 3 .*\n.*the disk is gone", done.stderr)


@pytest.mark.parametrize(
    "name",
    [
        *("config.toml", "metrics.jsonl", "logs", "logs/rank_0.log", "tb"),
        *("checkpoint/export", "checkpoint/.step-4.tmp"),
    ],
)
def test_a_link_in_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine") if "." in name else elsewhere.mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    config = load_config([f"--job.dump_folder={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=naming("dump_folder", link)):
        refuse_links(tmp_path / "run", [*written_names(config), "logs/rank_0.log"])
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(ConfigError, match=naming("dump_folder", link)):
        refuse_links(tmp_path / "run", [*written_names(config), "logs/rank_0.log"])
