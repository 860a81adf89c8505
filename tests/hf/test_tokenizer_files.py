"""What an export holds beside the weights, and whose tokenizer a run begins with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.finetune.chats import CHATML, SPECIAL, write_tokenizer
from tests.models.reference import random_decoder, reference_of
from torchtitan.api import load_generator
from torchtitan.build import describe_export
from torchtitan.generate.text import encode_chats
from torchtitan.hf.config import find_carried
from torchtitan.hf.export import export
from torchtitan.hf.names import GENERATION_CONFIG
from torchtitan.job import Config, load_config
from torchtitan.models.families import MODELS
from torchtitan.resume_rules import resolve_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
END, TURN = SPECIAL.index("<|end|>"), SPECIAL.index("<|im_end|>")


@pytest.mark.parametrize("has_own_file", [False, True])
def test_the_template_that_was_trained_on_is_what_transformers_finds(
    has_own_file: bool, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", template="other")
    if has_own_file:
        (folder / "chat_template.jinja").write_text("of the tokenizer")
    (tmp_path / "trained.jinja").write_text(CHATML)
    job = [f"--model.tokenizer_path={folder}"]
    examples = ["--training.dataset=synthetic_examples"]
    template = [f"--training.chat_template={tmp_path / 'trained.jinja'}"]
    own = "of the tokenizer" if has_own_file else "other"
    for options, expected in (([*examples, *template], CHATML), (examples, own), ([], own)):
        out = tmp_path / f"out{len(options)}"
        out.mkdir()
        config = load_config([*job, *options])
        for name, file in describe_export(config, dtype=None).files.items():
            shutil.copy(file, out / name)
        assert AutoTokenizer.from_pretrained(out).chat_template == expected


@pytest.mark.promise("no-code-from-data")
def test_an_export_keeps_keys_of_the_base_but_none_that_names_code(tmp_path: Path) -> None:
    kept = {"attention_dropout": 0.1, "initializer_range": 0.04, "pad_token_id": 5}
    others = {
        "auto_map": {"AutoModelForCausalLM": "someone/else--modeling.Model"},
        "custom_pipelines": {"text-generation": {"impl": "code.Pipeline"}},
        "attn_implementation": "someone/kernel",
        "text_config": {"inner": [{"auto_map": {"AutoConfig": "code.Config"}}]},
        "_name_or_path": "someone/else",
        "torch_dtype": "float64",
        "hidden_size": 7,
        "quantization_config": {"quant_method": "fp8"},
    }
    (tmp_path / "config.json").write_text(json.dumps({**others, **kept}))
    carried = find_carried(tmp_path, seq_len=32, eos_id=9)
    rest = {"max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": 9}
    assert carried == {**kept, **rest}


def base_with(generation: dict | None, folder: Path, *, eos: int | None = END) -> Path:
    """A base with a chat template whose turns end at another token than its texts."""
    model = random_decoder(replace(MODELS["llama3"].flavors["tiny"], vocab_size=420))
    reference_of(model).save_pretrained(write_tokenizer(folder, template=CHATML))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
    (folder / GENERATION_CONFIG).unlink(missing_ok=True)
    if generation is not None:
        (folder / GENERATION_CONFIG).write_text(json.dumps(generation))
    return folder


def tuning(base: Path, *options: str) -> Config:
    job = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", *options]
    job += ["--training.dataset=synthetic_examples", f"--checkpoint.initial_load_path={base}"]
    return resolve_model(load_config(job))


@pytest.mark.parametrize(
    ("there", "eos", "expected"),
    [
        ({"eos_token_id": END, "_from_model_config": True}, END, {"eos_token_id": [TURN, END]}),
        ({"eos_token_id": [9, TURN], "top_k": 2}, 7, {"eos_token_id": [TURN, 1, 7, 9], "top_k": 2}),
        ({"top_k": 2}, None, {"eos_token_id": [TURN, END], "top_k": 2}),
        (None, 7, {"eos_token_id": [TURN, END, 7]}),
    ],
)
def test_a_fine_tune_ends_its_turn(
    there: dict | None, eos: int | None, expected: dict, tmp_path: Path
) -> None:
    settings = describe_export(tuning(base_with(there, tmp_path / "base", eos=eos)), dtype=None)
    generation = dict(settings.generation or {})
    if there is None:
        generation = {"eos_token_id": generation["eos_token_id"]}  # and config.json's begin
    assert generation == expected


def test_transformers_stops_where_an_answer_stops(tmp_path: Path) -> None:
    base = base_with({"eos_token_id": END, "_from_model_config": True}, tmp_path / "base")
    model = random_decoder(replace(MODELS["llama3"].flavors["tiny"], vocab_size=420))
    weights = dcp.FileSystemWriter(tmp_path / "step-1" / "model")
    dcp.save(model.state_dict(), storage_writer=weights, no_dist=True)
    settings = replace(describe_export(tuning(base), dtype=None), card=None)
    export(tmp_path / "step-1", tmp_path / "out", settings=settings, group=None)
    lengths = {}
    for folder in (base, tmp_path / "out"):
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        favored = 10 * torch.nn.functional.one_hot(torch.tensor(TURN), 420)
        theirs.lm_head.register_forward_hook(lambda _, given, logits, by=favored: logits + by)
        asked = torch.tensor([[5, 6, 7]])
        lengths[folder.name] = theirs.generate(asked, max_new_tokens=5, do_sample=False).shape[1]
    assert lengths == {"base": 8, "out": 4}
    ours = load_generator(tmp_path / "out", device=torch.device("cpu"), chats=True)
    _, stop_ids = encode_chats(ours, [[{"role": "user", "content": "Who?"}]])
    assert stop_ids == {*GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id}
