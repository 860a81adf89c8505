"""Perplexity against `transformers` in float64, and against the trainer's own validation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.distributed import jobs
from tests.jobs import TINY8, pipeline
from tests.tools.evaluate.helpers import evaluate, write_model, write_texts
from torchtitan.data.tokenizer import build_tokenizer

SEQ_LEN = 48
CALLBACK = "torchtitan.tools.evaluate.callback:Perplexity"


@pytest.mark.promise("evaluation")
def test_figures_are_those_of_transformers(tmp_path: Path) -> None:
    reference = write_model(tmp_path / "model").double()
    texts = write_texts(tmp_path / "a.jsonl")
    tokenizer = build_tokenizer(str(tmp_path / "model"))
    row = [i for text in texts for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    num_samples = (len(row) - 1) // SEQ_LEN
    loss = 0.0
    for first in range(0, num_samples * SEQ_LEN, SEQ_LEN):
        ids = torch.tensor([row[first : first + SEQ_LEN + 1]])
        logits = reference(ids[:, :-1]).logits[0]
        loss += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    loss /= num_samples * SEQ_LEN
    words = ["--checkpoint", tmp_path / "model", "--perplexity", f"a={tmp_path / 'a.jsonl'}"]
    words += ["--seq_len", SEQ_LEN, "--dataset_cache", tmp_path / "cache", "--batch_size", 3]
    report = evaluate(*words)
    figures = report["perplexity"]["a"]
    num_bytes = sum(len(text.encode()) for text in texts)
    assert figures == {
        "loss": pytest.approx(loss, rel=1e-6),
        "perplexity": pytest.approx(math.exp(loss), rel=1e-5),
        "bits_per_byte": pytest.approx(loss / math.log(2) * len(row) / num_bytes, rel=1e-6),
        "num_tokens": num_samples * SEQ_LEN,
        "num_tokens_of_text": len(row),
        "num_documents": len(texts),
        "num_bytes": num_bytes,
    }
    assert (report["step"], report["settings"]["seq_len"]) == (None, SEQ_LEN)


@pytest.mark.long
@pytest.mark.promise("evaluation")
@pytest.mark.parametrize("attention", ["causal", "block_causal"])
def test_the_loss_is_that_of_the_trainers_validation(attention, ranks, tmp_path):
    write_texts(tmp_path / "a.jsonl")
    job = [*jobs.write_job(tmp_path), "--training.steps=2", "--optimizer.lr=0.1"]
    job += ["--validation.enable", "--validation.dataset=files"]
    job += [f"--validation.dataset_path={tmp_path / 'a.jsonl'}"]
    job += [f"--training.attn_mask_type={attention}", "--validation.local_batch_size=3"]
    trained = ranks.run(jobs.train, job, world=2)[0]
    words = ["--checkpoint", tmp_path / "run", "--perplexity", f"a={tmp_path / 'a.jsonl'}"]
    words += ["--dataset_cache", tmp_path / "cache"]
    report = evaluate(*words)
    expected = trained.rows[-1]["validation_loss"]
    assert report["perplexity"]["a"]["loss"] == pytest.approx(expected, rel=1e-6)
    assert (report["step"], report["settings"]["attn_mask_type"]) == (2, attention)


@pytest.mark.long
def test_a_token_store_gives_the_figures_of_its_text(tmp_path: Path) -> None:
    """Its bytes are counted by what its tokens spell."""
    write_model(tmp_path / "model")
    write_texts(tmp_path / "a.jsonl")
    words = ["--checkpoint", tmp_path / "model", "--dataset_cache", tmp_path / "cache"]
    text = evaluate(*words, "--perplexity", f"a={tmp_path / 'a.jsonl'}")
    [tokens] = (tmp_path / "cache").glob("*/tokens.bin")
    for file in (tokens, tokens.with_suffix(".idx")):
        file.rename(tmp_path / f"store{file.suffix}")
    store = evaluate(*words, "--perplexity", f"a={tmp_path / 'store'}")
    assert store["perplexity"] == text["perplexity"]


CP2 = ("--parallelism.context_parallel_degree=2",)


@pytest.mark.long
@pytest.mark.promise("evaluation")
@pytest.mark.parametrize("layout", [pipeline("1F1B"), CP2, ()], ids=["pp 2", "cp 2", "fsdp 2"])
def test_a_callback_finds_in_any_layout_what_the_command_finds(layout, ranks, tmp_path):
    write_texts(tmp_path / "a.jsonl")
    (tmp_path / "b.txt").write_text("nothing more, " * 30)
    domains = [f"{name}={tmp_path / file}" for name, file in (("a", "a.jsonl"), ("b", "b.txt"))]
    job = [*jobs.write_job(tmp_path, TINY8), *layout, "--training.steps=2"]
    job += ["--validation.enable", "--validation.dataset=synthetic"]
    callback = f'path = "{CALLBACK}", domains = {json.dumps(domains)}, tokenizer_path = "byte"'
    job += [f"--training.callbacks={{{callback}}}", "--training.local_batch_size=4"]
    job += ["--optimizer.lr=0.1"]
    trained = ranks.run(jobs.train, job, world=2)[0]
    words = ["--checkpoint", tmp_path / "run", "--perplexity", *domains]
    found = evaluate(*words, "--dataset_cache", tmp_path / "cache")["perplexity"]
    for name, figures in found.items():
        assert trained.rows[-1][f"loss_{name}"] == pytest.approx(figures["loss"], rel=1e-6)
        assert trained.rows[-1][f"perplexity_{name}"] == pytest.approx(figures["perplexity"])
