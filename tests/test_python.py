"""`import torchtitan`: the same jobs, errors and models as from the command line."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
import zipfile
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hatchling.builders.wheel import WheelBuilder

from tests.distributed.jobs import read_rows, write_job
from tests.naming import naming
from tests.test_two_runs import process_state
from torchtitan import (
    Config,
    chat,
    generate,
    load_config,
    load_generator,
    load_model,
    train,
)
from torchtitan.base.errors import NonFiniteError, UserError
from torchtitan.config.settings import to_toml
from torchtitan.generate.text import answer
from torchtitan.job import load_config as load_command
from torchtitan.train import main

ROOT = Path(__file__).parent.parent
FILE = "train_configs/debug_model.toml"


def job(folder: Path, *, name: str = "run", **overrides: object) -> Config:
    """The job of `write_job`, from Python."""
    write_job(folder, name=name)
    own: dict[str, object] = {
        "job.dump_folder": folder / name,
        "training.dataset_cache": folder / "cache",
    }
    return load_config(folder / f"{name}.toml", **own, **overrides)


@pytest.mark.promise("python-api")
@pytest.mark.parametrize(
    ("path", "overrides", "words"),
    [
        (None, {}, []),
        (Path(FILE), {"training": {"steps": 20}}, ["--training.steps=20"]),
        (
            None,
            {
                "training": {"dataloader": {"num_workers": 1}},
                "training.dataloader.pin_memory": False,
            },
            ["--training.dataloader.num_workers=1", "--training.dataloader.pin_memory=false"],
        ),
        (
            None,
            {"training": {"dataset": "files", "dataset_path": ("a.txt", Path("b") / "c.txt")}},
            ["--training.dataset=files", "--training.dataset_path", "a.txt", "b/c.txt"],
        ),
        (FILE, {"training": {"steps": None}}, [f"--training.steps={Config().training.steps}"]),
        (
            None,
            {"model": {"name": "examples.parallel_block:SPEC", "options": {"branch_scale": 0.5}}},
            ["--model.name=examples.parallel_block:SPEC", "--model.options.branch_scale=0.5"],
        ),
    ],
)
def test_settings_are_those_of_the_command_line(
    path: str | None, overrides: dict[str, Any], words: list[str]
) -> None:
    given = words if path is None else ["--job.config_file", str(path), *words]
    assert to_toml(load_config(path, **overrides)) == to_toml(load_command(given))


@pytest.mark.promise("python-api")
@pytest.mark.slow
def test_a_run_is_that_of_the_command_line(tmp_path: Path) -> None:
    """Bit for bit, its result is what it has written, and nothing stays in the process."""
    command = [*write_job(tmp_path, name="command"), "--training.steps=4"]
    with ExitStack() as cleanup:
        assert main([*command, "--debug.deterministic"], cleanup=cleanup) == 0
    before = process_state()
    config = job(tmp_path, **{"training.steps": 4, "debug.deterministic": True})
    result = train(config)
    assert process_state() == before
    rows = read_rows(tmp_path / "run")
    assert result.rows == rows
    assert [row["loss"] for row in rows] == [row["loss"] for row in read_rows(tmp_path / "command")]
    assert (result.step, result.loss, result.reason) == (4, rows[-1]["loss"], None)
    assert (result.folder, result.validation_loss) == (tmp_path / "run", None)
    assert result.tokens == rows[-1]["num_tokens"] > 0
    again = train(config)  # there is nothing left to do
    assert replace(again, rows=rows) == result


def test_the_first_and_the_last_step_are_logged(tmp_path: Path) -> None:
    result = train(job(tmp_path, **{"training.steps": 4, "metrics.log_freq": 3}))
    assert [row["step"] for row in result.rows] == [1, 3, 4]


def interrupt_at(step: int, *, folder: Path) -> threading.Thread:
    """Press Ctrl-C once the log says that a step is done."""

    def wait() -> None:
        log = folder / "logs" / "rank_0.log"
        while f"step: {step:>6}" not in (log.read_text() if log.is_file() else ""):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.promise("python-api")
def test_ctrl_c_ends_the_run_and_not_the_process(tmp_path: Path) -> None:
    endless = {"training.steps": 10**6, "lr_scheduler.total_steps": None}
    config = job(tmp_path, **endless, **{"checkpoint.interval": 10**6})
    thread = interrupt_at(3, folder=tmp_path / "run")
    result = train(config)
    thread.join()
    assert result.reason is not None
    assert "by a signal (to 1 rank); checkpoint saved" in result.reason
    assert 3 <= result.step < 10**6
    assert [path.name for path in (tmp_path / "run" / "checkpoint").glob("step-*")] == [
        f"step-{result.step}"
    ]


def test_in_another_thread_no_signal_is_taken(tmp_path: Path) -> None:
    results = []

    def run() -> None:
        with torch.no_grad():  # as a notebook may have said for good
            results.append(train(job(tmp_path, **{"training.steps": 2})))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [result.step for result in results] == [2]


@pytest.mark.slow
def test_a_failure_is_raised_and_noted(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="step 2"):
        train(job(tmp_path, **{"optimizer.lr": 1e30}))
    assert "torchtitan.base.log: step 2 " in (tmp_path / "run/logs/rank_0.log").read_text()
    assert not dist.is_initialized()


class Stops:
    """A callback that notes what it is told, and ends the run."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_step(self, step: int, row: dict[str, Any] | None) -> str | None:
        self.seen.append((step, row and row["loss"]))
        return "enough" if step == 2 else None

    def on_end(self, reason: str | None) -> None:
        self.seen.append(reason)


@pytest.mark.slow
def test_callbacks_follow_a_run(tmp_path: Path) -> None:
    callback = Stops()
    result = train(job(tmp_path), callbacks=[callback])
    assert result.step == 3
    assert result.reason is not None
    assert callback.seen[:-1] == [(row["step"], row["loss"]) for row in result.rows]
    assert str(callback.seen[-1]) in result.reason
    assert "enough" in result.reason


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(job(folder, **{"training.steps": 2, "checkpoint.last_save_in_hf": True}))
    return folder / "run"


TOKENS = torch.arange(24).view(2, 12)


@pytest.mark.promise("python-api")
def test_a_model_is_a_plain_module(trained: Path) -> None:
    model = load_model(str(trained), device="cpu", dtype="float32")
    labels = TOKENS.roll(-1, 1)
    labels[:, -1] = -100
    loss = model(TOKENS, labels=labels)
    wanted = F.cross_entropy(model(TOKENS).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not model.training
    halved = load_model(trained, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in halved.parameters()} == {torch.bfloat16}
    assert halved(TOKENS).dtype == torch.bfloat16


@pytest.mark.promise("python-api")
@pytest.mark.long
def test_text_is_that_of_the_command(
    trained: Path,
) -> None:
    options = ["--max_new_tokens=12", "--temperature=0.7", "--top_k=40", "--seed=3"]
    command = ["-m", "torchtitan", "generate", "--checkpoint", str(trained), *options]
    done = subprocess.run(
        [sys.executable, *command, "--prompt=naïve ", "--prompt=def"],
        capture_output=True,
        text=True,
        check=True,
    )
    texts = generate(
        trained, ["naïve ", "def"], max_new_tokens=12, temperature=0.7, top_k=40, seed=3
    )
    assert done.stdout == f"=== 1 of 2\n{texts[0]}\n=== 2 of 2\n{texts[1]}\n"
    generator = load_generator(trained)
    one = generate(generator, ["def"], max_new_tokens=12, temperature=0.7, top_k=40, seed=3)
    assert one == texts[1:]
    assert generate(generator, ["def"], max_new_tokens=1) != texts[1:]


def test_a_chat_is_answered(trained: Path) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    generator = load_generator(trained, chats=True)
    [wanted] = answer(generator, [messages], max_new_tokens=9, top_k=40, seed=3)
    for source in (trained, generator):
        assert chat(source, messages, max_new_tokens=9, top_k=40, seed=3) == wanted
    assert chat(generator, messages, max_new_tokens=9, top_k=40, seed=4) != wanted
    with pytest.raises(UserError, match="chats=True"):
        chat(load_generator(trained), messages)
    with pytest.raises(UserError, match=naming("message 1", "'robot'")):
        chat(generator, [{"role": "robot", "content": "Hi"}])


def test_all_files_of_the_package_are_shipped(tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as content:
        shipped = {name for name in content.namelist() if ".dist-info/" not in name}
    files = (path for path in (ROOT / "torchtitan").rglob("*") if path.is_file())
    names = {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".pyc"}
    names |= {
        f"torchtitan/train_configs/{path.name}" for path in (ROOT / "train_configs").iterdir()
    }
    assert "torchtitan/py.typed" in names
    assert shipped == names


@pytest.mark.slow
def test_the_wheel_trains_by_name_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Of this environment it has the dependencies, but no checkout."""
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    venv.create(tmp_path / "venv")
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    command = [tmp_path / "venv/bin/python", "-c"]
    command += ["import sys; from torchtitan.tools.command import run; run()", "train"]
    command += ["debug_model", "--training.dataset=synthetic", "--training.steps=2"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NGPU": "2"}
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [*command, "--training.seq_len=32", "--training.local_batch_size=2"],
        cwd=tmp_path / "empty",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "dp_shard 2" in done.stderr
    assert (tmp_path / "empty/outputs/debug_model/config.toml").is_file()


@pytest.mark.slow
def test_the_page_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run its blocks one after the other; a block's output is that on the page."""
    page = (ROOT / "docs" / "config.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", page, re.S | re.M)
    assert len(blocks) > 5
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code, shown in blocks:
        with redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        assert not shown or out.getvalue() == shown
    assert names["losses"][-1] == names["result"].loss
    assert names["logits"].shape == (1, 9, 263)


@pytest.mark.timeout(600)
@pytest.mark.long
def test_the_notebook_is_run(tmp_path: Path) -> None:
    """In a folder and a home of its own, as somebody who has just installed the package."""
    pytest.importorskip("nbconvert")
    notebook = ROOT / "examples" / "train_in_a_notebook.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "clear its outputs: they make no diff"
    shutil.copy(notebook, tmp_path / "run.ipynb")  # the kernel's folder is the notebook's
    command = [sys.executable, "-m", "nbconvert", "--to=notebook", "--execute", "run.ipynb"]
    subprocess.run(
        [*command, "--output=done"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        check=True,
    )
    done = json.loads((tmp_path / "done.ipynb").read_text())["cells"]
    outputs = [output for cell in done for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    [result] = [text for text in map(_plain_text, outputs) if text.startswith("Result(step=150,")]
    assert "reason=None" in result


def _plain_text(output: dict[str, Any]) -> str:
    return "".join(output.get("data", {}).get("text/plain", ""))
