"""Text from folders of Hugging Face, against what `transformers` writes with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.own_family import load_family, write_family
from tests.models.reference import VARIANTS, random_decoder, reference_of
from tests.naming import naming
from tests.tools.evaluate.helpers import write_model
from torchtitan.api import load_generator
from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.generate.generator import Generator, Pretrained, build_generator
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


def test_weights_are_of_the_type_that_is_stored_or_asked_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "normed heads", torch.bfloat16)
    for options, dtype in (({}, torch.bfloat16), ({"dtype": "float32"}, torch.float32)):
        parameters = list(opened(folder, **options).model.parameters())
        assert {p.dtype for p in parameters} == {dtype}


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "10000"),
        ({"hidden_size": 10**30}, "100000000"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"head_dim": 5}, "head_dim"),
        ({"head_dim": 6}, "wq.weight"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"dtype": "int8"}, "'int8'"),
        ({"eos_token_id": ["a"]}, "eos_token_id"),
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "normed heads")
    (folder / "generation_config.json").unlink()
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=naming(said)):
        opened(folder)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "tied")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=naming(folder, "model.safetensors", ".bin")):
        opened(folder)


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=naming(tmp_path, "lora.export_format")):
        opened(tmp_path)


def test_a_model_without_a_cache_generates_no_text(tmp_path: Path) -> None:
    family: Any = load_family(write_family(tmp_path))
    found = Pretrained(
        spec=family.SPEC,
        model=family.SPEC.build_meta(family.SIZES),
        weights=Checkpoint(path=tmp_path, group=None),
        dtype="float32",
        tokenizer="byte",
        chat_template=None,
        stop_ids=frozenset(),
    )
    with pytest.raises(ConfigError, match=naming("parallel", "`cache`")):
        build_generator(found, device=torch.device("cpu"))
