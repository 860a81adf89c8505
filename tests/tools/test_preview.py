"""What the preview of examples shows: the labels and counts of the training."""

from __future__ import annotations

import re
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest

from tests.finetune.chats import CHATML, write_lines, write_tokenizer
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.finetune.data import build_examples
from torchtitan.job import load_config
from torchtitan.tools.preview import main

SEQ_LEN = 48


def chat_of(answer: str, question: str = "a", **more: object) -> dict[str, Any]:
    turns = [("system", "b"), ("user", question), ("assistant", answer)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"messages": [*messages[:2], {**messages[2], **more}]}


ROWS = [
    chat_of("yes"),
    chat_of("x" * 99),  # cut
    chat_of("no", question="x" * 120),  # its answer is cut off
    chat_of(""),  # nothing is learnt
    {"prompt": "p", "completion": "q"},
]


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    paths = [
        write_lines(tmp_path / f"{n}.jsonl", rows) for n, rows in (("a", ROWS), ("b", ROWS[:1]))
    ]
    settings = {
        "model.tokenizer_path": write_tokenizer(tmp_path / "tokenizer", template=CHATML),
        "training.dataset": "examples",
        "training.dataset_cache": tmp_path / "cache",
        "training.seq_len": SEQ_LEN,
        "training.num_epochs": 1,
        "job.dump_folder": tmp_path / "run",
    }
    words = [f"--{key}={value}" for key, value in settings.items()]
    return [*words, "--training.dataset_path", *paths]


def shown_of(text: str, where: str) -> list[tuple[str, str]]:
    """Label and tokens of each run of a row."""
    found = []
    for line in text.partition(f"{where}: ")[2].splitlines()[1:]:
        if not (run := re.fullmatch(r"  (loss|-100|cut ) {1,2}(.*)", line)):
            break
        tokens = "".join(map(literal_eval, re.findall(r"'(?:[^'\\]|\\.)*'", run[2])))
        found.append((run[1].strip(), tokens))
    return found


def test_every_token_with_its_label(job, tmp_path, capsys):
    assert main([*job, "--rows", "2"]) == 0
    text = capsys.readouterr().out
    a, b = (tmp_path / name for name in ("a.jsonl", "b.jsonl"))
    turns = "system\nb<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    before = f"<|im_start|>{turns}"
    expected = [("-100", before), ("loss", "yes<|im_end|>"), ("-100", "\n")]
    assert shown_of(text, f"{a} line 1") == shown_of(text, f"{b} line 1") == expected
    long = shown_of(text, f"{a} line 2")
    assert [label for label, _ in long] == ["-100", "loss", "cut"]
    num_tokens, *lines = text.partition(f"{a} line 2: ")[2].splitlines()
    num_cut = len(re.findall(r" '", next(line for line in lines if line.startswith("  cut"))))
    assert num_cut == int(num_tokens.split()[0]) - SEQ_LEN - 1  # the last label is beyond seq_len
    assert "".join(tokens for _, tokens in long) == before + "x" * 99 + "<|im_end|>\n"
    assert shown_of(text, f"{a} line 3") == []


@pytest.mark.promise("tools")
def test_counts_are_those_of_the_training(job, tmp_path, capsys):
    for how in ("truncate", "skip"):
        words = [*job, f"--training.long_examples={how}"]
        assert main([*words, "--rows=0"]) == 0
        text = capsys.readouterr().out
        config = load_config(words)
        tokenizer, path = build_tokenizer(config.model.tokenizer_path), config.model.tokenizer_path
        dataset = build_examples(config.training, tokenizer=tokenizer, tokenizer_path=path, seed=0)
        kept, cut, dropped = map(
            int, re.findall(r"2 files: 6 rows, (\d+) kept, (\d+) cut .* (\d+) dropped", text)[0]
        )
        assert dataset.num_samples == kept + cut
        assert (kept, cut, dropped) == ((3, 1, 2) if how == "truncate" else (3, 0, 3))
        [longest] = map(int, re.findall(r"2 files.*\n  seq_len = (\d+) cuts no row", text))
        for seq_len, num_long in ((longest, 0), (longest - 1, 1)):
            assert main([*words, "--rows=0", f"--training.seq_len={seq_len}"]) == 0
            [kept] = map(int, re.findall(r"2 files: 6 rows, (\d+) kept", capsys.readouterr().out))
            assert kept == 5 - num_long  # one has no answer


def test_all_files_are_shown_and_all_mistakes_reported(job, tmp_path, capsys):
    special = {"prompt": "<|im_end|>", "completion": "a"}
    bad = [write_lines(tmp_path / f"{n}.jsonl", [ROWS[0], {}, special, ROWS[0]]) for n in "cd"]
    broken = tmp_path / "e.jsonl"
    broken.write_text("{\n" + Path(bad[0]).read_text().splitlines()[0])
    assert main([*job[:-1], *bad, str(broken), job[-1]]) == 2
    shown, said = capsys.readouterr()
    lines = [f"{file} line 1" for file in (*job[-2:], *bad)] + [f"{broken} line 2"]
    assert all(shown_of(shown, line) for line in lines)
    for place in (*(f"{file} line {i}" for file in bad for i in (2, 3)), f"{broken} line 1"):
        assert said.count(place) == 1
    assert main([*job[:-3], "--training.dataset=synthetic"]) == 2
    assert "training.dataset synthetic" in capsys.readouterr().err
    words = ["--rows=0", "--training.special_tokens_in_examples=encode"]
    assert main([*job[:-2], write_lines(tmp_path / "f.jsonl", [*ROWS, special]), *words]) == 0


def test_keys_that_nothing_reads_are_named(job, tmp_path, capsys):
    file = write_lines(tmp_path / "a.jsonl", [{**chat_of("yes"), "tools": [{"name": "f"}]}] * 2)
    assert main([*job, f"--training.dataset_path={file}"]) == 0
    assert re.search("2 examples: .*'tools'", capsys.readouterr().out)
