"""Tokenizers: against tiktoken's and `tokenizers`' own loaders, and against damaged files."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchtitan.base.errors import DataError
from torchtitan.data.text import split_text
from torchtitan.data.tokenizer import (
    BUILT_IN,
    LLAMA3_PATTERN,
    MAX_CHARS,
    build_tokenizer,
)

SAMPLES = [
    "",
    "Hello, world! It's 12345 o'clock.\n\n  indented\tTabs\r\n",
    "def f(x):\n    return x ** 2  # comment\n",
    "naïve café 中文字 русский \U0001f600 é",
    "<|end_of_text|> and <|begin_of_text|> spelt out",
    "     \n\n\n    ",
]
BUILT_INS = ["byte", "bpe_2048"]


@pytest.mark.promise("tokenizers")
@pytest.mark.parametrize("name", BUILT_INS)
def test_round_trip(name: str) -> None:
    tokenizer = build_tokenizer(name)
    for text in SAMPLES:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert [i.tolist() for i in tokenizer.encode_batch([text, text])] == [ids, ids]
    assert tokenizer.decode([tokenizer.eos_id]) == "<|end_of_text|>"
    # special tokens in text are plain text
    assert max(tokenizer.encode(SAMPLES[4])) < tokenizer.vocab_size - 2
    cut = tokenizer.encode("\U0001f600")[:2]
    for ids in (cut, [tokenizer.vocab_size], [-1, 10**9], list(range(256))):
        tokenizer.decode(ids)  # never raises
    assert "�" in tokenizer.decode(cut)


@pytest.mark.promise("tokenizers")
def test_tiktoken_ids_are_those_of_tiktoken_itself() -> None:
    lines = map(bytes.split, BUILT_IN["bpe_2048"].read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    oracle = tiktoken.Encoding(
        "oracle", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    tokenizer = build_tokenizer("bpe_2048")
    for text in SAMPLES:
        assert tokenizer.encode(text) == oracle.encode(text, disallowed_special=())
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (2048, 2047)


def llama3_file(path: Path) -> Path:
    tokens = [bytes([b]) for b in range(256)]
    tokens += [b"t%d" % i for i in range(128_000 - 256)]
    lines = (b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens))
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.promise("tokenizers")
def test_llama3_special_tokens(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(str(llama3_file(tmp_path / "tokenizer.model")))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (128_256, 128_001)
    # the ids that Llama 3's published tokenizer gives them
    known = {
        128_000: "<|begin_of_text|>",
        128_001: "<|end_of_text|>",
        128_002: "<|reserved_special_token_0|>",
        128_005: "<|reserved_special_token_3|>",
        128_006: "<|start_header_id|>",
        128_007: "<|end_header_id|>",
        128_008: "<|reserved_special_token_4|>",
        128_009: "<|eot_id|>",
        128_010: "<|reserved_special_token_5|>",
        128_255: "<|reserved_special_token_250|>",
    }
    assert {i: tokenizer.decode([i]) for i in known} == known


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    lines = BUILT_IN["bpe_2048"].read_bytes().splitlines()
    fewer = tmp_path / "fewer.tiktoken"
    fewer.write_bytes(b"\n".join(lines[:-1]))
    same = tmp_path / "same.tiktoken"
    same.write_bytes(b"\r\n".join(lines))
    prints = [build_tokenizer(n).fingerprint for n in (*BUILT_INS, str(fewer))]
    assert len(set(prints)) == 3
    assert build_tokenizer(str(same)).fingerprint == prints[1]


@pytest.mark.promise("tokenizers")
def test_long_texts_get_the_ids_of_the_whole() -> None:
    tokenizer = build_tokenizer("bpe_2048")
    text = "".join(f"def f{i}(x):\n\n    return {i} + x\n\n\n" for i in range(12_000))
    assert len(text) > 5 * MAX_CHARS
    # the library itself, whose limits this text does not reach
    assert tokenizer.encode(text) == tokenizer._encoding.encode_ordinary(text)  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", [" " * 10**6, "\n" * 10**6, "a" * 10**6, "x \n" * 300_000])
def test_endless_runs_do_not_overflow(text: str) -> None:
    tokenizer = build_tokenizer("bpe_2048")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "pattern",
    [
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),  # GPT-2's
    ],
)
def test_indented_text_is_cut_between_words(pattern: Any) -> None:
    rows = [{"id": i, "a list": [i, "two  words"], "none": {}} for i in range(9)]
    text = json.dumps(rows, indent=5) + "\n  \n"

    def words(text: str) -> list[str]:
        return [word for word, _ in pattern.pre_tokenize_str(text)]

    for limit in range(60, 90):
        pieces = [word for piece in split_text(text, limit=limit) for word in words(piece)]
        assert pieces == words(text)


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer with the tokens and merges of a small vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary["th"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<stop>", "</s>"])
    # stored settings that would lose or add tokens
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.promise("tokenizers")
def test_hugging_face(hf_folder: Path) -> None:
    tokenizer = build_tokenizer(str(hf_folder))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (259, 258)
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode("the </s> <stop>")
    assert len(ids) == 14
    assert max(ids) == 256
    assert [i.tolist() for i in tokenizer.encode_batch(["the", ""])] == [ids[:2], []]
    tokenizer.decode([10**6, 0])


@pytest.mark.promise("tokenizers")
def test_hugging_face_tokens_stated_beside_the_tokenizer(hf_folder: Path) -> None:
    stated = {"259": {"content": "<|end|>", "special": True}, "257": {"content": "<stop>"}}
    config = {"eos_token": "<|end|>", "added_tokens_decoder": stated}
    (hf_folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer(str(hf_folder))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (260, 259)
    [encoded] = tokenizer.encode_special(["a<|end|>"])
    assert encoded.ids[-1] == 259
    config["added_tokens_decoder"] = {"300": {"content": "<|end|>", "rstrip": True}}
    (hf_folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer(str(hf_folder))
    assert tokenizer.eos_id == 259
    public = PreTrainedTokenizerFast.from_pretrained(str(hf_folder))
    text = "a<|end|> b<|end|>c"
    [encoded] = tokenizer.encode_special([text])
    assert encoded.ids == public(text, add_special_tokens=False)["input_ids"]


def edited(**change: object) -> Callable[[Path], object]:
    """Return what changes keys of a tokenizer.json."""

    def edit(folder: Path) -> None:
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))

    return edit


def written(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


# numbers that point nowhere: the library panics, which is no Exception
CHARSMAP = base64.b64encode(b"\xff\xff\xff\x7f" * 4).decode()
BROKEN = [
    *(written("tokenizer.json", content) for content in (b"", b"{}", b"\xff\xfe", b"[1]")),
    *(written("tokenizer_config.json", content) for content in (b"[" * 100_000, b"{", b"\xff")),
    edited(added_tokens=[]),  # no end token
    edited(normalizer={"type": "Precompiled", "precompiled_charsmap": CHARSMAP}),
]


@pytest.mark.promise("no-code-from-data")
@pytest.mark.parametrize("damage", BROKEN)
def test_hugging_face_damaged(hf_folder: Path, damage: Callable[[Path], object]) -> None:
    damage(hf_folder)
    with pytest.raises(DataError, match=str(hf_folder / "tokenizer")):
        build_tokenizer(str(hf_folder)).encode("a")


def test_tokenising_needs_no_torch() -> None:
    code = (
        "import sys, torchtitan.data.prepare, torchtitan.data.corpus\n"
        "from torchtitan.data.tokenizer import build_tokenizer\n"
        "build_tokenizer('bpe_2048').encode('text')\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
