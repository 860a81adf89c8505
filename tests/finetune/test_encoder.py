"""Lines of examples: what is learnt of them, and every way in which they can be wrong."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Literal

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.finetune.chats import CHAT, CHATML, read_examples, write_lines, write_tokenizer
from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data.tokenizer import ByteTokenizer, build_tokenizer
from torchtitan.finetune.chat import Conversation, find_template
from torchtitan.finetune.encoder import (
    Encoder,
    is_answered,
)
from torchtitan.finetune.examples import Completion, Example
from torchtitan.finetune.sources import example_files, label_all

BYTE = ByteTokenizer()


def encoder() -> Encoder:
    return Encoder(BYTE, find_template(None, tokenizer=BYTE, tokenizer_path="byte"))


def labelled(encoder: Encoder, examples: list[Example]) -> list[tuple[list[int], list[bool]]]:
    rows = encoder.encode(examples)
    return [((row >> 1).tolist(), (row & 1).astype(bool).tolist()) for row in rows]


def say(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def test_lines_become_examples(tmp_path: Path) -> None:
    tools = [{"type": "function"}]
    values = [
        {"messages": CHAT, "id": 3},
        {"prompt": "a", "completion": " b", "source": "x"},
        {"messages": CHAT, "tools": tools},
    ]
    file = Path(write_lines(tmp_path / "a.jsonl", [*values]))
    file.write_text(file.read_text().replace("\n", "\n\n"))
    expected = [
        Conversation(CHAT, None, f"{file} line 1"),
        Completion("a", " b", f"{file} line 3"),
        Conversation(CHAT, tools, f"{file} line 5"),
    ]
    assert read_examples(file) == expected
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert len(read_examples(packed)) == 3


@pytest.mark.promise("tokenizers")
def test_hugging_face_tokenizers_divide_at_special_tokens_only_when_asked(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    tokenizer = build_tokenizer(str(folder))
    text = "a<|im_end|> b<think>"
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert list(tokenizer.encode_special([text])[0].ids) == oracle.encode(text).ids
    plain = tokenizer.encode(text)
    assert tokenizer.special_tokens["<|im_end|>"] not in plain
    assert "<think>" not in tokenizer.special_tokens
    assert plain[-1] == oracle.token_to_id("<think>")
    assert tokenizer.decode(plain) == text


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize("name", ["<|end_of_text|>", "<|begin_of_text|>"])
def test_examples_that_spell_special_tokens(name: str) -> None:
    injected = [say("user", f"a{name}assistant"), say("assistant", "b")]
    tools = [{"description": f"a {name} b"}]
    for example in (
        Conversation(injected, None, "here"),
        Conversation(CHAT, tools, "here"),
        Completion(f"a{name}", "b", "here"),
        Completion("a", f"b{name}", "here"),
    ):
        with pytest.raises(DataError, match=naming("here", f"'{name}'")):
            encoder().encode([example])


@pytest.mark.parametrize("setting", ["refuse", "encode"])
def test_marks_of_answers_are_no_special_tokens(setting: Literal["refuse", "encode"]) -> None:
    strict = Encoder(BYTE, encoder().template, special_tokens=setting)
    for example in (
        Conversation([say("user", "a\ufdd0b"), say("assistant", "b")], None, "here"),
        Conversation(CHAT, [{"description": "a\ufdd1"}], "here"),
    ):
        with pytest.raises(DataError, match=naming("here", "U+FDD0")):
            strict.encode([example])
    assert len(strict.encode([Completion("a\ufdd0", "b", "here")])) == 1  # no template reads it


def test_special_tokens_that_are_meant(tmp_path: Path) -> None:
    """The text of a conversation has the tokens and labels of the conversation."""
    folder = write_tokenizer(tmp_path, template=CHATML)
    tokenizer = build_tokenizer(str(folder))
    template = find_template(None, tokenizer=tokenizer, tokenizer_path=str(folder))
    assert template is not None
    chat = Conversation([CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]], None, "here")
    prompt = template.render(chat._replace(messages=CHAT[:3]), add_generation_prompt=True)
    completion = template.render(chat).removeprefix(prompt)
    assert completion.endswith("<|im_end|>\n")
    encoder = Encoder(tokenizer, template, special_tokens="encode")
    text = Completion(prompt, completion.removesuffix("\n"), "here")
    (oracle, trained), (ids, learnt) = labelled(encoder, [chat, text])
    end = tokenizer.eos_id
    # after the answer the template writes a line end, and a completion has an end token
    assert ids == [*oracle[:-1], end]
    assert learnt == [*trained[:-1], True]
    # an end token that is written is not added
    for tail in ("<|end|>", "<|end|>\n"):
        [(ids, _)] = labelled(encoder, [Completion("a", f"b{tail}", "here")])
        assert ids.count(end) == 1
    quoted = [CHAT[0], {"role": "assistant", "content": "a<|end|>b"}]
    [(ids, learnt)] = labelled(encoder, [Conversation(quoted, None, "here")])
    assert learnt[ids.index(end)]


@pytest.mark.parametrize("setting", ["refuse", "encode"])
def test_a_prompt_begins_as_in_inference(
    tmp_path: Path, setting: Literal["refuse", "encode"]
) -> None:
    folder = write_tokenizer(tmp_path, begins=True)
    tokenizer, oracle = build_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    encoder = Encoder(tokenizer, None, special_tokens=setting)
    rows = labelled(encoder, [Completion(prompt, " then", "here") for prompt in ("the user", "")])
    for prompt, (ids, trained) in zip(("the user", ""), rows, strict=True):
        given = oracle(prompt)["input_ids"]
        assert ids[: len(given)] == given
        assert given[0] == tokenizer.special_tokens["<|begin|>"]
        assert trained == [i >= len(given) for i in range(len(ids))]
    if setting == "encode":  # written already
        [(written, _)] = labelled(encoder, [Completion("<|begin|>the user", " then", "here")])
        assert written == rows[0][0]
    assert is_answered(encoder.encode([Completion("", "then", "here")])[0])


def mistakes_of(*files: Path) -> list[str]:
    source = example_files(files)
    with pytest.raises(DataError) as raised:
        list(label_all(source, encoder()))
    return str(raised.value).splitlines()


@pytest.mark.promise("mistakes")
def test_mistakes_of_all_files_and_rows_are_told_at_once(tmp_path: Path) -> None:
    good: dict[str, object] = {"prompt": "a", "completion": "b"}
    cannot_render = {"messages": [say("user", "a"), {"role": "assistant", "tool_calls": [{}]}]}
    special = {"prompt": "<|end_of_text|>", "completion": "b"}
    rows = [[good], [good, {"messages": []}, special, good], [cannot_render, good, {}], [good]]
    files = [Path(write_lines(tmp_path / f"{i}.jsonl", [*row])) for i, row in enumerate(rows)]
    files[3].write_text("{}x\n")
    missing, text = tmp_path / "none.jsonl", tmp_path / "a.txt"
    lines = mistakes_of(*files, missing, text)
    places = [f"{files[1]} line 2", f"{files[1]} line 3", f"{files[2]} line 1"]
    places += [f"{files[2]} line 3", str(files[3])]
    for place in (*places, str(missing), str(text)):
        assert sum(place in line for line in lines) == 1, (place, lines)
    assert len(lines) == 7
    assert sum("special_tokens_in_examples" in line for line in lines) == 1
