"""Streamed text against the whole, with each kind of tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from tests.finetune.chats import CHATML, write_tokenizer
from tests.models.reference import TINY, random_decoder
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.finetune.chat import find_template
from torchtitan.generate import text as text_module
from torchtitan.generate.chat import Chat
from torchtitan.generate.generator import Generator
from torchtitan.generate.text import (
    REPLACEMENT,
    StreamDecoder,
    answer,
    complete,
)

TEXT = "naïve \U0001f600\U0001f680 中文, and 'quotes' .  Ends"


def write_sentencepiece(folder: Path) -> Path:
    """A tokenizer as Llama 2's: spaces are marked, and what it does not know are bytes."""
    folder.mkdir()
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁and", "n", "a"]
    model = models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    replaced, bytes_, fused = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([replaced, bytes_, fused, decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=["byte", "bpe_2048", "hugging face", "sentencepiece"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "hugging face":
        return str(write_tokenizer(tmp_path / "tokenizer", template=CHATML))
    if request.param == "sentencepiece":
        return str(write_sentencepiece(tmp_path / "tokenizer"))
    return str(request.param)


def random_generator(path: str) -> Generator:
    tokenizer = build_tokenizer(path)
    return Generator(
        model=random_decoder(replace(TINY, vocab_size=tokenizer.vocab_size)),
        tokenizer=tokenizer,
        template=find_template(None, tokenizer=tokenizer, tokenizer_path=path),
        stop_ids=frozenset({tokenizer.eos_id}),
    )


def whole_characters(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    pieces = StreamDecoder(tokenizer)
    return [piece for i in ids if (piece := pieces.add([i]))] + [pieces.flush()]


def test_pieces_are_the_text_and_hold_whole_characters(path: str) -> None:
    tokenizer = build_tokenizer(path)
    ids = tokenizer.encode(TEXT)
    *pieces, rest = whole_characters(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == TEXT
    assert rest == ""
    assert REPLACEMENT not in "".join(pieces)
    assert len(pieces) > 10
    # cut inside the first emoji, and what no text holds
    broken = tokenizer.encode(TEXT[:7])[:-1]
    for cut in (broken, [*broken, *ids]):
        assert "".join(whole_characters(tokenizer, cut)) == tokenizer.decode(cut)


def test_an_answer_streamed_ends_before_the_token_that_ends_it(tmp_path: Path) -> None:
    generator = random_generator(str(write_tokenizer(tmp_path, template=CHATML)))
    end = generator.tokenizer.special_tokens["<|im_end|>"]
    weight = generator.model.output.weight.data
    weight[end] = weight.sum(0)  # often the likeliest
    chat = [{"role": "user", "content": "Who?"}]
    for seed in range(5):
        settings = {"max_new_tokens": 200, "seed": seed}
        text = "".join(Chat(generator, **settings).ask("Who?"))
        assert text == answer(generator, [chat], **settings)[0]
        assert "<|im_end|>" not in text


def test_special_tokens_are_meant_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are plain text otherwise: nothing that a user types ends a document."""
    generator, seen, text = random_generator("byte"), [], "a<|end_of_text|>"

    def record(model, prompts, **settings):
        seen.extend(prompts)
        return [[0] for _ in prompts]

    monkeypatch.setattr(text_module, "generate", record)
    for special in (False, True):
        complete(generator, [text, ""], special=special)
    assert seen == [list(text.encode()), [257], [97, 257], [257]]
