"""Text from folders of Hugging Face, against what `transformers` writes with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.reference import VARIANTS, random_decoder, reference_of
from tests.tools.evaluate.helpers import write_model
from torchtitan.api import load_generator
from torchtitan.generate.generator import Generator
from torchtitan.generate.sampling import generate
from torchtitan.generate.text import complete

PROMPTS = [[5, 200, 17, 17, 3], [7], list(range(1, 31))]


def folder_of(path: Path, variant: str, dtype: torch.dtype = torch.float32) -> Path:
    """A folder that transformers wrote, in sizes that no flavor has."""
    config = dataclasses.replace(VARIANTS[variant], num_layers=3)
    reference_of(random_decoder(config)).to(dtype).save_pretrained(path)
    return path


def opened(folder: Path, **options: Any) -> Generator:
    return load_generator(folder, device=torch.device("cpu"), tokenizer="byte", **options)


def their_text(folder: Path, prompt: list[int], length: int = 20) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([prompt])
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


@pytest.mark.promise("generation")
@pytest.mark.parametrize(
    "variant",
    [
        "scaled",
        "yarn",
        "tied",
        "normed heads",
        "normed heads, tied",
        "biased, tied",
        "window",
        "experts",
        "experts, first layer dense",
    ],
)
def test_greedy_text_is_that_of_transformers_whatever_the_sizes(
    variant: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, variant)
    model = opened(folder).model
    expected = [their_text(folder, prompt) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=20, temperature=0) == expected


@pytest.mark.promise("generation")
def test_a_text_begins_as_in_transformers(tmp_path: Path) -> None:
    """With the begin token that the tokenizer puts before it, unless the prompt names it."""
    write_model(tmp_path, begins=True)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    prompts = ["the user", "and then the assistant"]
    expected = [their_text(tmp_path, theirs(prompt)["input_ids"]) for prompt in prompts]
    generator = load_generator(tmp_path, device=torch.device("cpu"))
    settings: Any = {"max_new_tokens": 20, "temperature": 0}
    for begin in ("", "<|begin|>"):
        given = [begin + prompt for prompt in prompts]
        texts = complete(generator, given, special=True, **settings)
        for prompt, text, ids in zip(prompts, texts, expected, strict=True):
            assert text == prompt + generator.tokenizer.decode(ids)


@pytest.mark.promise("generation")
def test_text_ends_where_transformers_ends_it(tmp_path: Path) -> None:
    """By generation_config.json, one token or several, else by config.json."""
    folder = folder_of(tmp_path, "normed heads")
    ids = their_text(folder, PROMPTS[0])
    stops = [next(t for t in ids[3:] if t not in ids[:3]), 262]
    generation, config = folder / "generation_config.json", folder / "config.json"
    said = json.loads(config.read_text())
    for theirs, ours in (({"eos_token_id": stops}, {}), ({"eos_token_id": stops[0]}, {}), ({}, {})):
        generation.write_text(json.dumps(theirs))
        if not theirs:
            generation.unlink()
            ours = {"eos_token_id": stops}
        config.write_text(json.dumps({**said, **ours}))
        generator = opened(folder)
        [new] = generate(
            generator.model,
            PROMPTS[:1],
            max_new_tokens=20,
            temperature=0,
            stop_ids=generator.stop_ids,
        )
        assert new == their_text(folder, PROMPTS[0])
        assert new[-1] == stops[0]
        assert generator.stop_ids >= {257}  # the tokenizer's own
