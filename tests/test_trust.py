"""No tool runs what a folder names: every tool, with every key that takes an import path.

The run is a stranger's: its folder holds a module, and its settings name it.
"""

from __future__ import annotations

import functools
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan import api as torchtitan
from torchtitan.base.errors import UserError
from torchtitan.base.files import read_json
from torchtitan.checkpoint.checksums import MANIFEST, seal, write_bytes, write_json
from torchtitan.config.settings import keys, to_toml, value_at
from torchtitan.job import CONFIG_FILE, Config
from torchtitan.metrics.events import EVENTS
from torchtitan.resume_rules import Job
from torchtitan.tools import convert as convert_hf
from torchtitan.tools import generate, hang
from torchtitan.tools.evaluate import command as evaluate
from torchtitan.tools.explain import command as explain
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


def evil(key: str) -> str:
    return f"outputs.dl.evil:{key.replace('.', '_')}"


def naming(*keys: str) -> dict[str, object]:
    """Return settings that name things of the folder."""
    assert KEYS.keys() == {line.split('"')[1] for line in MODULE.splitlines() if '    "' in line}
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


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_does_not_need_is_not_imported(
    tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main, words, needed = TOOLS[tool]
    store(RUN, naming(*(key for key in KEYS if key not in needed)))
    code = main(words)
    said = capsys.readouterr().err
    assert not Path("ran").exists()
    assert "outputs.dl.evil" not in sys.modules
    assert "outputs.dl.evil" not in said
    assert code == 0, said


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize(
    ("tool", "key"), [(tool, key) for tool, (_, _, needed) in TOOLS.items() for key in needed]
)
def test_what_a_tool_needs_is_refused(
    tool: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main, words, _ = TOOLS[tool]
    store(RUN, naming(key))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert not Path("ran").exists()
    assert "outputs.dl.evil" not in sys.modules
    assert "Traceback" not in said
    remedy = () if tool == "explain" else (str(RUN), "--trust_code")  # for explain there is none
    for part in (key.partition(".")[2], evil(key), *remedy):
        assert part in said


@pytest.mark.parametrize(
    ("tool", "keys"),
    [(tool, TOOLS[tool][2]) for tool in ("generate", "evaluate", "average", "convert")],
)
def test_trust_code_imports_it_where_it_is_needed(
    tool: str,
    keys: Sequence[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    main, words, _ = TOOLS[tool]
    store(RUN, naming(*keys))
    code = main([*words, "--trust_code"])
    said = capsys.readouterr().err
    assert Path("ran").exists()
    assert "--trust_code" not in said
    assert code == 0, said


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize("path", ["os:abort", "torch.hub:load"])
def test_what_is_imported_already_is_no_more_trusted(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store(RUN, {"model.name": path})
    main, words, _ = TOOLS["generate"]
    assert main(words) == 2
    assert path in capsys.readouterr().err


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
