"""The command: what it reports, on one rank and on two, and what it says of mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.finetune.chats import write_tokenizer
from tests.tools.evaluate import helpers
from tests.tools.evaluate.conftest import stay_offline
from tests.tools.evaluate.helpers import evaluate, numbers_of
from torchtitan.tools.evaluate import command, model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, text and tasks."""
    folder = tmp_path_factory.mktemp("evaluated")
    helpers.write_model(folder / "model")
    helpers.write_texts(folder / "a.jsonl")
    (folder / "b.txt").write_text("nothing more, " * 30)
    (folder / "empty.txt").write_text("")
    helpers.write_tasks(folder / "tasks")
    write_tokenizer(folder / "bare")
    return folder


def words(folder: Path, *more: str) -> list[str]:
    """Arguments with {} in the place of the folder."""
    common = ("--checkpoint {}/model", *more)
    return [word.replace("{}", str(folder)) for text in common for word in text.split(" ")]


EVERYTHING = (
    "--perplexity a={}/a.jsonl b={}/b.txt a={}/b.txt --dataset_cache {}/cache --seq_len 40",
    "--tasks choose,roll,write --include_path {}/tasks --limit 8",
)


@pytest.mark.slow
def test_the_report_holds_figures_and_settings(folder, capsys):
    file = folder / "report.json"
    assert command.main([*words(folder, *EVERYTHING), "--output", str(file)]) == 0
    assert f"checkpoint: {folder}" in capsys.readouterr().out
    report = json.loads(file.read_text())
    # a name that is given again adds files
    assert [figures["num_documents"] for figures in report["perplexity"].values()] == [41, 1]
    assert {*report["tasks"]["choose"]["figures"]} == {"acc", "acc_norm"}
    settings = report["settings"]
    assert (settings["seq_len"], settings["dtype"], settings["limit"]) == (40, "float32", 8)


def on_ranks(words: list[str], cache: Path) -> dict[str, Any]:
    """Evaluate with a model that these ranks share."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    with pytest.MonkeyPatch.context() as patch:
        stay_offline(patch, cache=cache / str(dist.get_rank()))
        patch.setenv("LOCAL_RANK", "0")  # by which the harness decides who gets its figures
        patch.setattr(model, "join_tensor_parallel", lambda: (torch.device("cpu"), mesh))
        return evaluate(*words)


@pytest.mark.long
def test_two_ranks_that_share_a_model_find_what_one_finds(folder, ranks, tmp_path):
    given = words(folder, *EVERYTHING)
    alone = evaluate(*given)
    found = ranks.run(on_ranks, given, tmp_path, world=2)
    # bit for bit the same, or ranks would part
    assert found[0] == found[1]
    assert found[0]["settings"]["num_ranks"] == 2
    for name, figures in alone["perplexity"].items():
        assert found[0]["perplexity"][name] == pytest.approx(figures, rel=1e-5)
    for name, task in alone["tasks"].items():
        other = found[0]["tasks"][name]
        assert numbers_of(other) == pytest.approx(numbers_of(task), rel=1e-5), name


PERPLEXITY = "--perplexity a={}/a.jsonl --dataset_cache {}/cache"
TASKS = "--tasks choose --include_path {}/tasks"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), "--perplexity"),
        (("--perplexity web={}/none.txt",), "--perplexity web"),
        (("--perplexity web={}/empty.txt",), "empty.txt"),
        ((PERPLEXITY, "--seq_len 65"), "--seq_len"),
        ((PERPLEXITY, "--tokenizer bpe_2048"), "2048 ids"),
        ((PERPLEXITY, "--output {}/none/r.json"), "--output"),
        ((PERPLEXITY, "--limit 3"), "--limit"),
        ((TASKS, "--include_path {}/none"), "--include_path"),
        ((TASKS, "--tokenizer {}/bare --apply_chat_template"), "--chat_template"),
    ],
)
def test_mistakes_end_with_one_message_and_code_2(folder, capsys, given, named):
    assert command.main(words(folder, *given)) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("error:")) == ("", 1)
    assert named in captured.err
