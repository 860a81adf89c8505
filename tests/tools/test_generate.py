"""The command against the library: same text, from every folder that may be named."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.finetune.chats import CHATML, write_tokenizer
from tests.models.reference import random_decoder, reference_of
from torchtitan.api import load_generator
from torchtitan.checkpoint.checksums import seal, write_bytes
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.generate.sampling import generate
from torchtitan.generate.text import answer
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.resume_rules import find_run_step
from torchtitan.tools import generate as command

PROMPT = "naïve "


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Result]:
    """A run of three steps on two ranks, saved after the second and the third."""
    folder = tmp_path_factory.mktemp("trained")
    job = jobs.write_job(folder)
    overrides = ["--training.steps=3", "--checkpoint.interval=2", "--optimizer.lr=0.1"]
    return folder / "run", ranks.run(jobs.train, [*job, *overrides], world=2)[0]


def expected_text(weights, **settings) -> str:
    model = Decoder(MODELS["llama3"].flavors["tiny"])
    model.load_state_dict(weights)
    tokenizer = build_tokenizer("byte")
    ids = tokenizer.encode(PROMPT)
    [new] = generate(model, [ids], stop_ids={tokenizer.eos_id}, **settings)
    ids += new
    return tokenizer.decode([i for i in ids if i != tokenizer.eos_id]) + "\n"


GREEDY = {"max_new_tokens": 30, "temperature": 0.0}
DRAWN = {"max_new_tokens": 30, "temperature": 1.5, "top_k": 40, "seed": 5}


def words_of(settings) -> list[str]:
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


@pytest.mark.promise("generation")
@pytest.mark.parametrize("settings", [GREEDY, DRAWN])
@pytest.mark.parametrize("folder", [".", "checkpoint", "checkpoint/step-3/model"])
def test_text_is_that_of_the_last_weights(trained, capsys, folder, settings):
    run, result = trained
    words = ["--checkpoint", str(run / folder), "--prompt", PROMPT, *words_of(settings)]
    assert command.main(words) == 0
    assert capsys.readouterr().out == expected_text(result.final, **settings)


@pytest.mark.parametrize(
    ("folder", "options", "message"),
    [
        ("nowhere", [], "nowhere"),
        (".", ["--max_new_tokens", str(10**12)], "--max_new_tokens"),
        (".", ["--temperature", "-1"], "temperature"),
        (".", ["--batch_size", "0"], "--batch_size"),
        (".", ["--system", "Be brief."], "--system"),
        (".", ["--chat", "--prompt", "<|end_of_text|>"], "prompt 2"),
        (".", ["--prompts_file", "/dev/zero"], "/dev/zero"),
        (".", ["--tokenizer", "bpe_2048"], "2048 ids"),
    ],
)
def test_mistakes_end_with_one_message_and_code_2(trained, capsys, folder, options, message):
    run, _ = trained
    assert command.main(["--checkpoint", str(run / folder), "--prompt", PROMPT, *options]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("error:")) == ("", 1)
    assert message in captured.err


def test_many_prompts_are_numbered_and_each_is_as_alone(trained, capsys, tmp_path):
    run, result = trained
    file = tmp_path / "prompts.txt"
    file.write_text(f"a\n\n{PROMPT}\n", encoding="utf-8")
    prompts = ["--prompt", PROMPT, "--prompt", "a longer one", "--prompts_file", str(file)]
    arguments = ["--checkpoint", str(run), *prompts, *words_of(DRAWN), "--batch_size", "3"]
    assert command.main(arguments) == 0
    written = capsys.readouterr().out
    parts = re.split(r"^=== \d of 4\n", written, flags=re.MULTILINE)
    assert len(parts) == 5
    assert parts[1] == parts[4] == expected_text(result.final, **DRAWN)
    assert parts[3][0] == "a"


def test_a_chat_is_asked_by_its_template_and_ends_with_its_turn(tmp_path, capsys):
    """Of a folder that transformers wrote; its template's own tokens are special."""
    config = replace(MODELS["qwen3"].flavors["tiny"], vocab_size=420)
    model = random_decoder(config)
    folder = write_tokenizer(tmp_path / "theirs", template=CHATML)
    reference_of(model).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Sys."}, {"role": "user", "content": "Who?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    [new] = generate(model, [ids], max_new_tokens=30, temperature=0)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    arguments = ["--chat", "--system", "Sys.", "--prompt", "Who?", "--temperature", "0"]
    arguments += ["--checkpoint", str(folder), "--max_new_tokens", "30"]
    assert command.main(arguments) == 0
    assert end not in new
    assert capsys.readouterr().out == tokenizer.decode(new) + "\n"
    # without a template there is no chat, unless one is given
    write_tokenizer(folder, template=None)
    assert command.main(arguments) == 2
    (tmp_path / "mine.jinja").write_text(CHATML)
    arguments += ["--chat_template", str(tmp_path / "mine.jinja")]
    # now the head draws the end of a turn where it drew one of the tokens
    n = next(n for n in range(2, 30) if new[n] not in new[:n])
    weight = model.output.weight.detach()
    weight[[end, new[n]]] = weight[[new[n], end]]
    reference_of(model).save_pretrained(folder)
    assert command.main(arguments) == 0
    assert capsys.readouterr().out == tokenizer.decode(new[:n]) + "\n"


def test_a_terminal_gets_no_control_characters(trained, monkeypatch) -> None:
    """Of the 256 bytes that this model draws from, 30 are."""
    printed = []
    for is_terminal in (False, True):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(sys.stdout, "isatty", lambda value=is_terminal: value)
        options = ["--prompt", "a", "--max_new_tokens", "99", "--temperature", "9"]
        assert command.main(["--checkpoint", str(trained[0]), *options]) == 0
        printed.append(sys.stdout.getvalue())
    assert re.search(r"[\x00-\x08\x0e-\x1f]", printed[0])
    assert not re.search(r"[\x00-\x08\x0e-\x1f]", printed[1])


def test_a_chat_without_a_prompt_answers_standard_input(trained, capsys, monkeypatch):
    """Each line is answered in the light of those before it."""
    generator = load_generator(trained[0], device=torch.device("cpu"), chats=True)
    messages = [{"role": "system", "content": "Sys."}]
    texts = []
    for question in ("naïve?", "And?"):
        messages.append({"role": "user", "content": question})
        texts += answer(generator, [messages], max_new_tokens=9, temperature=0)
        messages.append({"role": "assistant", "content": texts[-1]})
    monkeypatch.setattr(sys, "stdin", io.StringIO("naïve?\nAnd?\n"))
    options = ["--chat", "--system", "Sys.", "--max_new_tokens", "9", "--temperature", "0"]
    assert command.main(["--checkpoint", str(trained[0]), *options]) == 0
    assert capsys.readouterr().out == f"{texts[0]}\n{texts[1]}\n"


def test_a_damaged_step_is_refused_or_passed_over(trained, tmp_path, capsys):
    """Of step 3 twice, one byte of a weight of the later one is changed."""
    for step in (3, 4):
        shutil.copytree(trained[0] / "checkpoint" / "step-3", tmp_path / f"step-{step}")
    about = json.loads((tmp_path / "step-4" / "manifest.json").read_text())
    del about["checksum"]
    write_bytes(tmp_path / "step-4" / "manifest.json", seal(about | {"step": 4}))
    file = next((tmp_path / "step-4" / "model").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    arguments = ["--checkpoint", str(tmp_path / "step-4"), "--prompt", PROMPT]
    assert command.main(arguments) == 2
    assert "model/__0_0.distcp" in capsys.readouterr().err
    assert command.main([*arguments, "--skip_verify"]) == 0
    for verify, step in ((True, 3), (False, 4)):
        assert find_run_step(tmp_path, verify=verify) == tmp_path / f"step-{step}"
