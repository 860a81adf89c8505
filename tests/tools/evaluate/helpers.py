"""What tests of evaluation share: a model in a Hugging Face folder, text, and tasks of the
harness that read a local file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.finetune.chats import CHATML, write_tokenizer
from tests.models.reference import random_decoder, reference_of
from torchtitan.models.families import MODELS
from torchtitan.tools.evaluate import command, model

METRICS = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}


def write_model(folder: Path, *, begins: bool = False) -> PreTrainedModel:
    """Write a random Llama with a tokenizer, which may put a begin token before each text."""
    write_tokenizer(folder, template=CHATML, begins=begins)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # an even number, to be split; what no token has is never drawn
    size = tokenizer.get_vocab_size() // 8 * 8 + 8
    config = replace(MODELS["llama3"].flavors["tiny8"], vocab_size=size, num_layers=2)
    reference = reference_of(random_decoder(config))
    reference.config.max_position_embeddings = 64
    reference.save_pretrained(folder)
    return reference


def write_texts(file: Path) -> list[str]:
    texts = [f"naïve {i} and the answer {i * i}, nothing more. " * (1 + i % 3) for i in range(40)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def write_tasks(folder: Path) -> Path:
    """Write a task of each kind: choose, roll and write."""
    folder.mkdir(exist_ok=True)
    rows = [
        {
            "question": f"What is {i} and {i + 1}?  ",
            "choices": [f" {2 * i + 1}", f" the user {i} says nothing", " x", " y"],
            "answer": i % 3,
            "text": f"then {i} and {i + 1} is {2 * i + 1}. " * (1 + i % 8),
        }
        for i in range(12)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    generated = {"generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12}}
    for name, kind, text, target, more in (
        ("choose", "multiple_choice", "{{question}}", "answer", {"doc_to_choice": "choices"}),
        ("roll", "loglikelihood_rolling", "", "{{text}}", {}),
        ("write", "generate_until", "{{text}}{{question}}", "{{text}}", generated),
    ):
        task: dict[str, Any] = {"task": name, "output_type": kind, **more}
        task |= {"doc_to_text": text, "doc_to_target": target, "target_delimiter": ""}
        task |= {"dataset_path": "json", "test_split": "test", "fewshot_split": "test"}
        task["dataset_kwargs"] = {"data_files": {"test": str(folder / "rows.json")}}
        task["metric_list"] = [{"metric": metric} for metric in METRICS[kind]]
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def evaluate(*words: object) -> dict[str, Any]:
    """Return the report of a command line."""
    args = command._parser().parse_args([*map(str, words)])
    return model.evaluate(args, command.check(args))


def numbers_of(task: Mapping[str, Any]) -> dict[str, float]:
    """Return a task's figures and their errors, where they have one."""
    return {
        f"{metric} {kind}": number
        for metric, figure in task["figures"].items()
        for kind, number in figure.items()
        if number is not None
    }
