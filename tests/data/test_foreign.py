"""Hostile templates and tokenizer files: each ends with a message, and the next one works."""

from __future__ import annotations

import base64
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from tests.sft.chats import CHAT, CHATML, write_tokenizer
from torchtitan.base.errors import DataError
from torchtitan.data import foreign, tokenizer_hf
from torchtitan.data.foreign import ForeignError, Limits, Loaded, Program
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.sft import chat
from torchtitan.sft.chat import ChatTemplate, Conversation
from torchtitan.sft.examples import Encoder


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, origin="x.jinja", variables={}, special=["<|im_end|>"])


TOO_LONG = "more than 1 s of processor time"
TOO_LARGE = "too much memory|more than 1 GiB of memory|characters, at most|" + TOO_LONG
NESTED = "{% for b in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = OF %}{% endfor %}"
HOSTILE = {
    "loops": (NESTED, TOO_LONG),
    "power": ("{% set x = 10 ** (10 ** 9) %}", TOO_LONG),
    "power of a variable": ("{{ (messages | length) ** (10 ** 9) }}", TOO_LONG),
    "recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        TOO_LONG,
    ),
    "replace": ("{{ ('a' * 10**5) | replace('a', 'b' * 10**6) }}", TOO_LARGE),
    "lists in lists": (
        DOUBLED.replace("OF", "[n.x, n.x]") + "{{ n.x }}",
        TOO_LARGE,
    ),
    "text": ("{{ 'a' * 10**11 }}", TOO_LARGE),
    "concatenation": (DOUBLED.replace("OF", "n.x ~ n.x"), TOO_LARGE),
    "centre": ("{{ 'a' | center(10**11) }}", TOO_LARGE),
    "format": ("{{ '%99999999999d' % 1 }}", TOO_LARGE),
    "indent": ("{{ messages | tojson(indent=10**11) }}", TOO_LARGE),
    "list": ("{{ [1] * 10**11 }}", TOO_LARGE),
    "long": ("{{ 'a' * ((messages | length) * 17500000) }}", TOO_LARGE),
    "half a character": ("{{ '\\ud800' }}", "surrogates not allowed"),
    "deep expression": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion depth"),
    "deep lists": ("{{ " + "[" * 5000 + "]" * 5000 + " }}", "recursion depth"),
    "deep blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "recursion depth|too many|nested"),
    "not": ("{{ " + "not " * 9000 + "1 }}", "recursion depth"),
    "endless macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion depth"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source, said = HOSTILE[name]
    monkeypatch.setattr(chat, "LIMITS", Limits(seconds=1, gib=1))
    with pytest.raises(DataError, match=f"chat.template:? x.jinja .*({said}).*; mend") as caught:
        template_of(source).conversations([Conversation(CHAT, None, "f.jsonl line 7")])
    assert "must be valid Jinja" in str(caught.value) or "f.jsonl line 7" in str(caught.value)
    # the next one has a child that works
    assert template_of("{{ messages | length }}").render(Conversation(CHAT, None, "")) == "4"


def test_of_many_conversations_the_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "LIMITS", Limits(seconds=1, gib=1))
    source = "{% if messages[2:] %}" + NESTED + "{% endif %}{% generation %}{% endgeneration %}"
    chats = [Conversation(CHAT[:n], None, f"line {n}") for n in (1, 2, 3, 4)]
    with pytest.raises(DataError, match=r"line 3: .* fails: it takes more than 1 s"):
        template_of(source).conversations(chats)


def test_many_at_once_are_each_as_one_alone(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=CHATML)
    encoder = Encoder(build_tokenizer(str(folder)), template_of(CHATML))
    chats = [Conversation(CHAT[:n], None, "") for n in (1, 2, 3, 4)] * 2
    rows = encoder.encode(chats)
    for row, example in zip(rows, chats, strict=True):
        (alone,) = encoder.encode([example])
        assert (row is None) == (alone is None)
        assert row is None or alone is None or row.tolist() == alone.tolist()


def tokenizer_file(folder: Path, **parts: object) -> str:
    """Write a tokenizer of letters with other parts, as the library spells them."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


EXPONENTIAL, SQUARE = Regex(r"(a+)+b"), Regex(r"\w*\d")


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": pre_tokenizers.Split(EXPONENTIAL, "isolated")},
        {"pre_tokenizer": pre_tokenizers.Split(SQUARE, "isolated")},
        {
            "normalizer": normalizers.Sequence(
                [normalizers.Replace("a", "a" * 1000), *[normalizers.Replace("a", "a" * 1000)] * 3]
            )
        },
    ],
    ids=["exponential", "square", "growth"],
)
def test_hostile_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, object]
) -> None:
    monkeypatch.setattr(tokenizer_hf, "LIMITS", Limits(seconds=1, gib=1))
    monkeypatch.setattr(tokenizer_hf, "SECONDS_PER_CHAR", 0.0)
    tokenizer = build_tokenizer(tokenizer_file(tmp_path, **parts))
    texts = ["b", "good", "a" * 300_000 + "c", "good"]
    said = r"tokenizer\.json fails on the text that begins 'aaa.*(1 s|memory|retry-limit).*; use"
    with pytest.raises(DataError, match=said):
        tokenizer.encode_batch(texts)
    assert len(tokenizer.encode_batch(["b", "good"])) == 2


def test_a_tokenizer_whose_library_panics(tmp_path: Path) -> None:
    """A charsmap of one number that points nowhere: the library panics, which is no Exception."""
    file = Path(tokenizer_file(tmp_path)) / "tokenizer.json"
    content = json.loads(file.read_text())
    charsmap = base64.b64encode(b"\xff\xff\xff\x7f" * 4).decode()
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer\.json (must be|fails on)"):
        build_tokenizer(str(file)).encode("a")


def load_probe(source: bytes) -> foreign.Loaded:
    """A program for these tests: what it is asked, as Python."""
    names = {"os": os, "signal": signal}
    return lambda item: eval(item, names), source.decode()


def probe(**limits: float) -> Program:
    limits = {"seconds": 5, "gib": 1, **limits}
    return Program(f"{__name__}:load_probe", b"probe", limits=Limits(**limits))  # type: ignore[arg-type]


def test_results_come_in_order_from_a_process_that_is_kept() -> None:
    program = probe()
    assert program.about == "probe"
    first, *rest = program.run(["os.getpid()", "1 + 1", "'a'"])
    assert rest == [2, "a"]
    assert program.run(["os.getpid()"]) == [first] != [os.getpid()]
    with pytest.raises(ForeignError, match="division by zero") as caught:
        program.run(["1", "1 / 0", "2"])
    assert caught.value.index == 1
    assert program.run(["os.getpid()"]) == [first]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("os.abort()", "SIGABRT"),
        ("os._exit(0)", "exit code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("sum(range(10**12))", "more than 5 s"),
    ],
)
def test_a_process_that_ends_is_replaced(item: str, said: str) -> None:
    program = probe()
    with pytest.raises(ForeignError, match=said) as caught:
        program.run(["1", item, "2"])
    assert caught.value.index == 1
    assert program.run(["1"]) == [1]


def test_it_hears_no_signal_to_the_job() -> None:
    kill = "[os.kill(os.getpid(), s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]"
    assert probe().run([kill, "1"])[1] == 1


def test_it_leaves_when_there_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    program = probe()
    (first,) = program.run(["os.getpid()"])
    monkeypatch.setattr(foreign, "SECONDS_IDLE", 0)
    assert program.run(["os.getpid()"]) != [first]


def test_one_that_was_killed_in_quiet_is_replaced() -> None:
    program = probe()
    (first,) = program.run(["os.getpid()"])
    os.kill(first, signal.SIGKILL)
    time.sleep(0.2)
    assert program.run(["os.getpid()"]) != [first]


def test_threads_share_it() -> None:
    program = probe()
    with ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda i: program.run([f"{i} * 2"]), range(50))
        assert [*results] == [[2 * i] for i in range(50)]


def test_it_ends_with_its_parent() -> None:
    code = (
        "import os, signal, tests.data.test_foreign as t\n"
        "print(t.probe().run(['os.getpid()'])[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    child = int(done.stdout)
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("it lives on")


def load_thread_count(source: bytes) -> Loaded:
    """A program that tells how many threads its process has once numpy is there."""
    importlib.import_module("numpy")
    return lambda item: len(os.listdir("/proc/self/task")), None


def test_threads_of_numpy_take_none_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of many cores their stacks alone could be more than a template may have."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    program = Program(f"{__name__}:load_thread_count", b"", limits=Limits(seconds=10, gib=1))
    assert program.run([None]) == [1]
