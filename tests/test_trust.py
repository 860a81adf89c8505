"""No tool runs what a folder names: every tool, with every key that takes an import path.

The run is a stranger's: its folder holds a module, and its settings name it.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan import api as torchtitan
from torchtitan.base.custom import load_object
from torchtitan.base.errors import UserError
from torchtitan.base.files import read_json
from torchtitan.checkpoint.checksums import MANIFEST, seal, write_bytes, write_json
from torchtitan.config.settings import checked, keys, to_toml, value_at
from torchtitan.job import CONFIG_FILE, Config
from torchtitan.metrics.events import EVENTS
from torchtitan.models.decoder import Decoder
from torchtitan.resume_rules import Job
from torchtitan.tools import convert as convert_hf
from torchtitan.tools import generate, hang
from torchtitan.tools.audit import command as explain
from torchtitan.tools.compare import command as compare
from torchtitan.tools.compare.layouts import launch
from torchtitan.tools.evaluate import command as evaluate
from torchtitan.tools.report import command as report

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RUN = Path("outputs/dl")
MODULE = """
from pathlib import Path
from examples import own_dataset, own_hooks, own_optimizer
from torchtitan.models.families import MODELS

Path("ran").touch()
OBJECTS = {
    "model.name": MODELS["llama3"],
    "training.dataset": own_dataset.Sums,
    "validation.dataset": own_dataset.Sums,
    "training.loss": own_hooks.smoothed,
    "training.callbacks": own_hooks.StopEarly,
    "metrics.sinks": own_hooks.CsvSink,
    "optimizer.name": own_optimizer.Lion,
    "lr_scheduler.decay_type": own_hooks.quadratic,
}
globals().update({key.replace(".", "_"): found for key, found in OBJECTS.items()})
"""
KEYS = {
    ".".join(path): key
    for path, key in keys(Config).items()
    if path == ("model", "name")
    or any("package.module" in getattr(x, "text", "") for x in key.metadata)
}
COMPUTES = ("model.name", "training.loss", "optimizer.name", "lr_scheduler.decay_type")

Main = Callable[[Sequence[str]], int]
TOOLS: dict[str, tuple[Main, list[str], Sequence[str]]] = {
    # what it is, its words, and the keys whose objects it needs
    "report": (report.main, [str(RUN), "--out=report.html"], ()),
    "hang": (hang.main, [str(RUN)], ()),
    "explain": (explain.main, [str(RUN), "--step=2", "--text"], ("training.dataset",)),
    "generate": (
        generate.main,
        [f"--checkpoint={RUN}", "--prompt=a", "--max_new_tokens=1"],
        ("model.name",),
    ),
    "evaluate": (
        evaluate.main,
        [f"--checkpoint={RUN}", "--perplexity", "a=text.txt", "--dataset_cache=cache"],
        ("model.name",),
    ),
    "average": (convert_hf.main, ["average", str(RUN), "averaged"], ("model.name",)),
    "convert": (convert_hf.main, ["to-hf", str(RUN), "converted"], ("model.name",)),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings: dict[str, Any] = {
        "job.dump_folder": folder,
        "model": {"flavor": "tiny", "tokenizer_path": "byte"},
        "training": {"dataset": "synthetic", "steps": 3, "seq_len": 64, "local_batch_size": 1},
        "training.dataset_cache": folder.parent / "cache",
        "checkpoint": {"enable": True, "interval": 1},
        "metrics.log_freq": 1,
    }
    torchtitan.train(torchtitan.load_config(**settings))
    (folder / "comm_traces").mkdir()
    record: dict[str, object] = {"pg_config": {}, "entries": []}
    (folder / "comm_traces" / "gloo_0").write_bytes(pickle.dumps(record))
    return folder


@pytest.fixture(autouse=True)
def workplace(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the run in it, in a process that has named nothing."""
    shutil.copytree(trained, tmp_path / RUN)
    (tmp_path / RUN / "evil.py").write_text(MODULE)
    (tmp_path / "text.txt").write_text("some text " * 20)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1]), *sys.path])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if name.startswith(("outputs", "evil")):
            del sys.modules[name]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What processes the trainer is started by; none runs, and each has failed."""
    seen: list[dict[str, Any]] = []

    def start(command: Sequence[str], **options: Any) -> SimpleNamespace:
        seen.append({"command": command, **options})
        return SimpleNamespace(poll=lambda: 1, wait=lambda timeout: 1, returncode=1)

    names = ("DEVNULL", "TimeoutExpired")
    fake = SimpleNamespace(Popen=start, **{name: getattr(subprocess, name) for name in names})
    monkeypatch.setattr(launch, "subprocess", fake)
    return seen


def evil(key: str) -> str:
    return f"outputs.dl.evil:{key.replace('.', '_')}"


def naming(*keys: str) -> dict[str, object]:
    """Return settings that name things of the folder."""
    validates = "validation.dataset" in keys
    used = {"validation.enable": True, "validation.steps": 1} if validates else {}
    return {**{key: evil(key) for key in keys}, **used}


def store(run: Path, settings: Mapping[str, object], **facts: object) -> None:
    """Let all settings that lie in a run's folder have these values, and starts of its events say
    `facts`, as somebody would who cares."""

    def changed(toml: str) -> str:
        config = Job.stored(toml).config
        for key, value in settings.items():
            section, name = key.split(".")
            is_list = isinstance(value_at(config, (section, name)), tuple)
            part = value_at(config, (section,))
            part = replace(part, **{name: (value,) if is_list else value})
            config = replace(config, **{section: part})
        return to_toml(config)

    file = run / CONFIG_FILE
    file.write_text(changed(file.read_text()))
    for step in run.glob("checkpoint/step-*"):
        manifest = read_json(step / MANIFEST)
        manifest["config"] = changed(manifest["config"])
        del manifest["checksum"]
        write_bytes(step / MANIFEST, seal(manifest))
    rows = [json.loads(line) for line in (run / EVENTS).read_text().splitlines()]
    for row in rows:
        if row["event"] == "start":
            row |= {"config": changed(row["config"]), **facts}
    (run / EVENTS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_these_are_the_keys_that_name_code() -> None:
    assert set(KEYS) == {
        "model.name",
        "training.dataset",
        "training.loss",
        "training.callbacks",
        "validation.dataset",
        "optimizer.name",
        "lr_scheduler.decay_type",
        "metrics.sinks",
    }


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_does_not_need_is_not_imported(
    tool: str, capsys: pytest.CaptureFixture[str], starts: list[dict[str, Any]]
) -> None:
    main, words, needed = TOOLS[tool]
    store(RUN, naming(*(key for key in KEYS if key not in needed)))
    code = main(words)
    said = capsys.readouterr().err
    assert not Path("ran").exists()
    assert "outputs.dl.evil" not in sys.modules
    assert "outputs.dl.evil" not in said
    assert not starts
    assert code == 0, said


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize(
    ("tool", "key"), [(tool, key) for tool, (_, _, needed) in TOOLS.items() for key in needed]
)
def test_what_a_tool_needs_is_refused(
    tool: str, key: str, capsys: pytest.CaptureFixture[str], starts: list[dict[str, Any]]
) -> None:
    main, words, _ = TOOLS[tool]
    store(RUN, naming(key))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert not Path("ran").exists()
    assert "outputs.dl.evil" not in sys.modules
    assert not starts
    assert "Traceback" not in said
    for part in (key.partition(".")[2], evil(key), str(RUN), "--trust_code"):
        assert part in said


@pytest.mark.parametrize(
    ("tool", "keys"),
    [
        # but for the optimizer, which it cannot rehearse
        ("explain", ["training.dataset"]),
        *((tool, TOOLS[tool][2]) for tool in ("generate", "evaluate", "average", "convert")),
    ],
)
def test_trust_code_imports_it_where_it_is_needed(
    tool: str,
    keys: Sequence[str],
    capsys: pytest.CaptureFixture[str],
    starts: list[dict[str, Any]],
) -> None:
    main, words, _ = TOOLS[tool]
    store(RUN, naming(*keys))
    code = main([*words, "--trust_code"])
    said = capsys.readouterr().err
    assert Path("ran").exists()
    assert "--trust_code" not in said
    if tool == "explain":
        assert "the data must be" in said  # these are not what was trained on
        return
    assert not starts
    assert code == 0, said


@pytest.mark.parametrize("path", ["os:abort", "torch.hub:load", "torchtitan.train:main"])
def test_what_is_imported_already_is_no_more_trusted(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store(RUN, {"model.name": path})
    main, words, _ = TOOLS["generate"]
    assert main(words) == 2
    assert path in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["generate", "convert"])
def test_a_step_beside_the_users_own_module_is_read(tool: str) -> None:
    shutil.copy(RUN / "evil.py", "evil_mine.py")
    store(RUN, {"model.name": "evil_mine:model_name"})
    shutil.copytree(RUN / "checkpoint" / "step-3", "step-3")
    main, words, _ = TOOLS[tool]
    words = [word.replace(str(RUN), "step-3") for word in words]
    assert main(words) == 2
    assert main([*words, "--trust_code"]) == 0


@pytest.mark.promise("no-code-from-checkpoints")
def test_python_asks_for_trust_too() -> None:
    store(RUN, {"model.name": evil("model.name")})
    with pytest.raises(UserError, match="trust_code"):
        torchtitan.load_model(RUN)
    assert torchtitan.load_tokenizer(RUN).vocab_size
    assert not Path("ran").exists()
    assert sum(1 for _ in torchtitan.load_model(RUN, trust_code=True).parameters())
    with pytest.raises(UserError, match="trust_code"):
        torchtitan.load_generator(RUN)


@pytest.mark.parametrize("key", KEYS)
def test_a_job_that_resumes_in_the_folder_compares_text(key: str) -> None:
    store(RUN, naming(key))
    config = Job.stored_in(RUN / CONFIG_FILE).config
    section, name = key.split(".")
    plain = value_at(Config(), (section, name))
    mine = replace(value_at(config, (section,)), **{name: plain})
    job = replace(config, **{section: mine})
    job = replace(job, job=replace(job.job, dump_folder=str(RUN)))
    start = functools.partial(torchtitan.train, job)
    if key.startswith(("metrics", "validation")) or key == "training.callbacks":
        start()  # it shapes nothing
    else:
        with pytest.raises(UserError, match=name):
            start()
    assert not Path("ran").exists()


SHELL = "a\ntouch ran\r\ntouch ran; $(touch ran)`touch ran`' touch ran \" touch ran"
ESCAPE = "\x1b]0;title\x07"


@pytest.mark.parametrize("tool", ["report"])
def test_half_a_character_is_damage(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    store(RUN, {}, layout="\ud800")
    main, words, _ = TOOLS[tool]
    assert main(words) == 2
    assert EVENTS in capsys.readouterr().err


def test_stored_text_steers_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    (RUN / "logs").mkdir(exist_ok=True)
    (RUN / "logs" / "rank_1.log").write_text(ESCAPE)
    group = {"desc": ESCAPE, "ranks": "[0, 1]"}
    entry = {
        "is_p2p": False,
        "process_group": ["0", ESCAPE],
        "input_sizes": [[1]],
        "collective_seq_id": 1,
        "profiling_name": f"{ESCAPE}\ud800",
        "time_created_ns": 0,
    }
    record = {"pg_config": {"0": group}, "entries": [entry]}
    (RUN / "comm_traces" / "gloo_0").write_bytes(pickle.dumps(record))
    assert hang.main([str(RUN)]) == 0
    (RUN / CONFIG_FILE).write_text(f'x = "{ESCAPE.encode("unicode_escape").decode()}"')
    assert hang.main([str(RUN)]) == 2
    said = capfd.readouterr()
    assert "title" in said.out
    assert ESCAPE not in said.out + said.err


@pytest.mark.slow
def test_a_run_goes_on_without_the_code_that_it_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {
        "job.dump_folder": "outputs/own",
        "model": {"flavor": "tiny", "tokenizer_path": "byte"},
        "training": {"dataset": "synthetic", "steps": 1, "seq_len": 64, "local_batch_size": 1},
        "checkpoint": {"enable": True, "mode": "continue"},
    }
    own_decay = {"lr_scheduler.decay_type": "examples.own_hooks:quadratic"}
    first = {**settings, **own_decay, "checkpoint": {"enable": True}}
    torchtitan.train(torchtitan.load_config(**first))
    settings["training"]["steps"] = 2
    assert torchtitan.train(torchtitan.load_config(**settings)).step == 2


@pytest.mark.parametrize("tool", ["generate", "evaluate"])
def test_code_that_exits_is_no_success(
    tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leave = functools.wraps(Decoder.forward)(lambda *args, **kwargs: sys.exit(0))
    monkeypatch.setattr(Decoder, "forward", leave)
    main, words, _ = TOOLS[tool]
    assert main(words) == 2
    assert "SystemExit(0)" in capsys.readouterr().err


def test_a_tools_output_is_no_url() -> None:
    main, words, _ = TOOLS["evaluate"]
    tools = ((main, words, "--output"), (compare.main, ["layouts", "job.toml", "dp2"], "--out"))
    for tool, given, option in tools:
        with pytest.raises(SystemExit) as ended:
            tool([*given, f"{option}=s3://bucket/x"])
        assert ended.value.code == 2


def test_a_stored_path_stays_one(tmp_path: Path) -> None:
    config = Job.stored('[model]\nname = "m:SPEC"\n[training]\ncallbacks = ["m:C"]').config
    copies = [config, replace(config.model), copy.deepcopy(config), checked(config)]
    name = copies.pop(1).name  # type: ignore[union-attr]
    paths = [c for one in copies for c in (one.model.name, one.training.callbacks[0]["path"])]
    for path in (name, *paths, pickle.loads(pickle.dumps(name))):
        with pytest.raises(UserError, match="trust_code"):
            load_object(path, key="model.name")


@pytest.mark.slow
@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize("decay", ["outputs.dl.evil", "outputs.dl.evil:x", [1]])
def test_a_stored_schedule_names_no_code(decay: object) -> None:
    for step in Path(RUN).glob("checkpoint/step-*"):
        file = step / "lr_scheduler" / "state.json"
        record = write_json(file, {**read_json(file), "decay_type": decay})
        manifest = read_json(step / MANIFEST)
        entry = {"size": record.size, "xxh3_128": record.digest}
        manifest["files"]["lr_scheduler/state.json"] = entry
        del manifest["checksum"]
        write_bytes(step / MANIFEST, seal(manifest))
    job = Job.stored_in(Path(RUN) / CONFIG_FILE).config
    job = replace(job, job=replace(job.job, dump_folder=str(RUN)))
    job = replace(job, training=replace(job.training, steps=4))
    job = replace(job, checkpoint=replace(job.checkpoint, mode="continue"))
    with suppress(UserError):
        torchtitan.train(job)
    assert not Path("ran").exists()
