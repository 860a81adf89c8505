"""Chat templates: the text and the marked tokens of `transformers`, and every way to be wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jinja2 import TemplateError, UndefinedError
from jinja2.sandbox import SecurityError
from transformers import AutoTokenizer

from tests.finetune.chats import CHAT, CHATML, MARKED, TEMPLATES, write_tokenizer
from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.finetune.chat import ChatTemplate, Conversation, Rendered, find_template
from torchtitan.finetune.encoder import Encoder
from torchtitan.finetune.examples import parse_answers

TOOLS = [{"type": "function", "function": {"name": "f<é>", "parameters": {}}}]
CALL = [
    {"role": "user", "content": "Call it."},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "It is 1."},
]


def template_of(source: str, **variables: str) -> ChatTemplate:
    return ChatTemplate(source, origin="x.jinja", variables=variables, special=["<|im_end|>"])


def divided(template: ChatTemplate, messages: list[dict[str, object]], where: str) -> Rendered:
    return template.divide(Conversation(messages, None, where))


def found(folder: Path, setting: str | None = None) -> ChatTemplate:
    template = find_template(
        setting, tokenizer=build_tokenizer(str(folder)), tokenizer_path=str(folder)
    )
    assert template is not None
    return template


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_tokenizer(tmp_path, template=TEMPLATES[name])
    template, oracle = found(folder), AutoTokenizer.from_pretrained(folder)
    chats = [CHAT[:1], CHAT, *([CALL] if name == "llama3" else [])]
    for chat in chats:
        for prompt in (False, True):
            expected = oracle.apply_chat_template(
                chat, tools=TOOLS, tokenize=False, add_generation_prompt=prompt
            )
            got = template.render(Conversation(chat, TOOLS, "here"), add_generation_prompt=prompt)
            assert got == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_question_and_the_end_of_its_answer(tmp_path: Path, name: str) -> None:
    folder = write_tokenizer(tmp_path, template=TEMPLATES[name])
    tokenizer, oracle = build_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    asked = Encoder(tokenizer, found(folder)).encode_prompt(Conversation(CHAT[:3], None, "here"))
    expected = oracle.apply_chat_template(CHAT[:3], add_generation_prompt=True, return_dict=False)
    assert asked == expected
    ends = {"llama3": "<|eot|>", "instruct": "<|end|>"}
    assert found(folder).end_of_turn() == ends.get(name, "<|im_end|>")


@pytest.mark.promise("chat-masks", "tokenizers")
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_tokenizer(tmp_path, template=TEMPLATES[name])
    tokenizer, oracle = build_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    row = Encoder(tokenizer, found(folder)).encode([Conversation(CHAT, None, "here")])[0]
    assert row is not None
    assert (row >> 1).tolist() == oracle.apply_chat_template(CHAT, return_dict=False)
    learnt = oracle.decode((row >> 1)[(row & 1).astype(bool)])
    end = {"llama3": "<|eot|>", "instruct": "<|end|>"}.get(name, "<|im_end|>")
    answers = [message["content"] for message in CHAT[1::2]]
    if name == "llama3":
        answers = [answer.strip() for answer in answers]
    space = " " if name == "instruct" else ""
    assert learnt == "".join(space + answer + end for answer in answers)


@pytest.mark.promise("chat-masks")
def test_the_marked_tokens_of_transformers(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=MARKED)
    oracle = AutoTokenizer.from_pretrained(folder)
    # no leading spaces: of an answer that begins with one, and all after it, it marks nothing
    chat = [{**message, "content": message["content"].strip()} for message in CHAT]
    # the header's last line end and the answer's first ones are a token, which counts as the answer
    chat += [CHAT[0], {"role": "assistant", "content": "\n\nSo."}]
    encoder = Encoder(build_tokenizer(str(folder)), found(folder))
    row = encoder.encode([Conversation(chat, None, "here")])[0]
    expected = oracle.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert row is not None
    assert (row >> 1).tolist() == expected["input_ids"]
    assert (row & 1).tolist() == expected["assistant_masks"]


@pytest.mark.promise("chat-masks")
def test_prefixes_find_what_marks_say(tmp_path: Path) -> None:
    """Two ways to the same tokens, on the template whose marks hold the end of the turn too."""
    folder = write_tokenizer(tmp_path, template=MARKED)
    unmarked = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}\n", "")
    (tmp_path / "plain.jinja").write_text(unmarked)
    tokenizer = build_tokenizer(str(folder))
    rows = [
        Encoder(tokenizer, found(folder, setting)).encode([Conversation(CHAT, None, "here")])[0]
        for setting in (None, str(tmp_path / "plain.jinja"))
    ]
    assert rows[0] is not None
    assert np.array_equal(*rows)


REASONS_LAST = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and loop.last %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.promise("chat-masks")
def test_a_template_that_writes_earlier_answers_differently() -> None:
    """As Qwen3's: reasoning only of the last answer. Each answer is learnt after what the model
    reads before it at inference."""
    question, reasons = {"role": "user", "content": "ask"}, {"reasoning": "so"}
    chat = [question, {"role": "assistant", "content": "yes", **reasons}] * 2
    template = template_of(REASONS_LAST)
    for example in parse_answers({"messages": chat}, where="here"):
        with pytest.raises(DataError):
            template.divide(example)
    examples = parse_answers({"messages": chat}, where="here", train_on="each")
    texts = [template.divide(example) for example in examples]
    assert [(text[:begin], text[begin:end]) for text, [(begin, end)] in texts] == [
        ("<user>ask;<assistant>", "(so)yes;"),
        ("<user>ask;<assistant>yes;<user>ask;<assistant>", "(so)yes;"),
    ]


@pytest.mark.timeout(60, method="thread")  # the other method has the only timer
def test_a_template_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan.finetune.chat.MAX_SECONDS", 0.2)
    loops = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    with pytest.raises(DataError, match="line 7"):
        divided(template_of(loops), list(CHAT), "f.jsonl line 7")


@pytest.mark.promise("no-code-from-data")
@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ bos_tokn }}", UndefinedError),
        ("{{ nothing.at.all }}", UndefinedError),
        ("{{ raise_exception('roles must alternate') }}", TemplateError),
        ("{{ ''.__class__ }}", SecurityError),
        ("{{ ''.__class__.__mro__ }}", SecurityError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{{ raise_exception.__globals__ }}", SecurityError),
        ("{{ '{0.__class__}'.format(1) }}", SecurityError),
        ("{% for i in range(10**9) %}x{% endfor %}", OverflowError),
        ("{{ [messages] | tojson(default='{0.__class__}'.format) }}", TypeError),
        ("{% include '/etc/passwd' %}", TypeError),  # there is no loader of files
        ("{% extends '/etc/passwd' %}", TypeError),
        ("{% import '/etc/passwd' as a %}", TypeError),
        ("{{ '\\ud800' }}", UnicodeEncodeError),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", RecursionError),
        ("{{ 'a' + 1 }}", TypeError),
    ],
)
def test_templates_that_fail(source: str, cause: type[Exception]) -> None:
    chat = list(CHAT)
    with pytest.raises(DataError, match=naming("f.jsonl line 7", "x.jinja")) as error:
        divided(template_of(source), chat, "f.jsonl line 7")
    assert type(error.value.__cause__) is cause
    assert chat == CHAT


def learnt_of(source: str, messages: list[dict[str, object]]) -> list[str]:
    rendered = divided(template_of(source), messages, "f line 1")
    return [rendered.text[start:stop] for start, stop in rendered.spans]


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_answers_that_are_not_learnt(source: str) -> None:
    """Those of weight 0, and those that say nothing, by prefixes and by marks."""
    ask = {"role": "user", "content": "Go on.", "weight": 1}
    answers = [{"role": "assistant", "content": text} for text in ("One.", "", "Two.")]
    chat = [message for answer in answers for message in (ask, answer)]
    assert learnt_of(source, chat) == ["One.<|im_end|>", "Two.<|im_end|>"]
    both = ["One.<|im_end|>", "Two.<|im_end|>"]
    for said, expected in (
        ({"weight": 0}, both[1:]),
        ({"weight": 1}, both),
        ({"train": False}, both[1:]),
        ({"train": True}, both),
        ({"train": True, "weight": 0}, both[1:]),
    ):
        weighed = [chat[0], {**chat[1], **said}, *chat[2:]]
        assert learnt_of(source, weighed) == expected
    assert learnt_of(source, chat[2:4]) == []


@pytest.mark.parametrize("content", ["Welcome!", "a", "<|im_start|>", " system\n"])
def test_an_answer_without_a_question(content: str) -> None:
    """Templates that look at the first message fail, or write another text, without one."""
    start = {"role": "assistant", "content": content}
    assert learnt_of(CHATML, [start, *CHAT[:2]])[0] == f"{content}<|im_end|>"
    late = CHATML.replace("if messages[0]['role'] != 'system'", "if messages")
    assert learnt_of(late, [start])[0] == f"{content}<|im_end|>"


THINKING = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize(
    "answer", [{"content": "Hello."}, {"content": "x</think>Hello.", "reasoning_content": "Greet."}]
)
def test_a_first_answer_is_learnt_as_a_later_one(answer: dict[str, str]) -> None:
    said = {"role": "assistant", **answer}
    first, later = learnt_of(THINKING, [said, {"role": "user", "content": "Hi"}, said])
    assert first == later
    assert first.endswith("Hello.<|im_end|>")


@pytest.mark.parametrize("name", ["byte", "bpe_2048"])
def test_built_in_tokenizers_have_a_template(name: str) -> None:
    tokenizer = build_tokenizer(name)
    template = find_template(None, tokenizer=tokenizer, tokenizer_path=name)
    row = Encoder(tokenizer, template).encode([Conversation(CHAT, None, "here")])[0]
    assert row is not None
    text = "".join(f"{m['role']}<|begin_of_text|>{m['content']}<|end_of_text|>" for m in CHAT)
    assert tokenizer.decode((row >> 1).tolist()) == text
    learnt = tokenizer.decode((row >> 1)[(row & 1).astype(bool)].tolist())
    assert learnt == "".join(f"{m['content']}<|end_of_text|>" for m in CHAT[1::2])
    # what the model is given when it answers are the very tokens before the answer
    assert template is not None
    given = template.render(Conversation(CHAT[:1], None, "here"), add_generation_prompt=True)
    ids = list(tokenizer.encode_special([given])[0].ids)
    assert (row >> 1)[: len(ids)].tolist() == ids
    assert not (row & 1)[: len(ids)].any()
    assert (row & 1)[len(ids)]


def test_templates_of_a_folder_are_chosen_as_in_transformers(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=CHATML)
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text(CHATML)
    tool_use = "{{ tools | tojson }}" + CHATML
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    oracle, encoder = (
        AutoTokenizer.from_pretrained(folder),
        Encoder(build_tokenizer(str(folder)), found(folder)),
    )
    for tools in (None, TOOLS):
        [row] = encoder.encode([Conversation(CHAT, tools, "here")])
        expected = oracle.apply_chat_template(CHAT, tools=tools, return_dict=False)
        assert (row >> 1).tolist() == expected
