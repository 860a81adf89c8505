"""What `explain` says, against the log of samples, the files' bytes and itself backwards."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from examples.sample_log import append
from tests.distributed import jobs
from torchtitan.config.settings import to_toml
from torchtitan.data.loader import Loader
from torchtitan.data.sampler import SkippedSamples
from torchtitan.data.store import TokenStore, open_writer
from torchtitan.job import load_config
from torchtitan.mesh.dims import resolve_dims
from torchtitan.metrics.events import EventLog, Hardware
from torchtitan.tools.explain.command import explain_document, explain_step, main
from torchtitan.tools.explain.documents import RunData, Span
from torchtitan.tools.explain.steps import Stretch, read_history

CACHE, CONFIG = "--training.dataset_cache=cache", "--job.config_file=run/config.toml"
CP, PP = (f"--parallelism.{kind}_parallel_degree=2" for kind in ("context", "pipeline"))
LOCAL_BATCH = 2
TRAINING: dict[str, str] = {
    "mixed": 'dataset=files dataset_path=["a.jsonl","texts/*","store.idx","b.json"] '
    "dataset_weights=[0.5,0.3,0.15,0.05] attn_mask_type=block_causal",
    "split": 'dataset=files dataset_path=["a.jsonl","texts/*"]',
    "packed": 'dataset=examples dataset_path=["sft.jsonl"] packing=packed '
    "attn_mask_type=block_causal",
    "gaps": 'dataset=files dataset_path=["a.jsonl"] skip_samples=["3-21","40-40"]',
    "padded": 'dataset=examples dataset_path=["sft.jsonl"]',
}
SETTINGS = {kind: [f"--training.{w}" for w in text.split()] for kind, text in TRAINING.items()}
SETTINGS["split"].append("--validation.holdout_fraction=0.3")
SMALL = (
    *("--model.flavor=tiny", "--model.tokenizer_path=byte", "--lr_scheduler.warmup_steps=2"),
    f"--training.local_batch_size={LOCAL_BATCH}",
    *("--training.global_batch_size=8", "--training.seq_len=32"),
    "--training.callbacks=examples.sample_log:SampleLog",
)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write files of every kind, with blank lines, empty texts and documents of any length."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(7)

    def text(most: int) -> str:
        return " ".join(f"word{draw.randrange(9999)}" for _ in range(draw.randrange(1, most)))

    def write_rows(name: str, rows: Sequence[dict[str, str]]) -> None:
        lines = [json.dumps(row) + "\n" * (1 + (n % 7 == 0)) for n, row in enumerate(rows)]
        Path(name).write_text("".join(lines))

    write_rows("a.jsonl", [{"text": text(40) if n % 9 else ""} for n in range(60)])
    Path("b.json").write_text(json.dumps([{"text": text(20)} for _ in range(20)]))
    Path("texts").mkdir()
    Path("texts/one.txt").write_text(text(900))
    Path("texts/two.txt.gz").write_bytes(gzip.compress(text(600).encode()))
    with open_writer("store", vocab_size=300) as writer:
        for n in range(30):
            ids = np.frombuffer(text(30 if n % 5 else 2).encode(), np.uint8).astype(np.int64)
            writer.add(ids if n != 13 else ids[:0], ends_document=True)
    examples = [(text(2 if n % 5 else 9), text(4) if n % 8 else "") for n in range(200)]
    write_rows("sft.jsonl", [{"prompt": one, "completion": other} for one, other in examples])


def drive(run: Path, arguments: list[str], *, world: int, steps: int) -> None:
    """Draw the samples of all steps as each rank would, and log them."""
    given = [*SMALL, *arguments, f"--training.steps={steps}", f"--job.dump_folder={run}"]
    config = load_config(given)
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(config))
    record = Hardware(resumed_from=0, world_size=world, ranks_per_machine=world, device="cpu")
    EventLog(run).write("start", step=0, **asdict(record))
    dims, dataset = resolve_dims(config.parallelism, world_size=world), RunData(config).dataset
    (run / "samples").mkdir()
    for rank in range(0, world // dims.pp, dims.cp * dims.tp):
        loader = Loader(
            dataset,
            local_batch_size=LOCAL_BATCH,
            accumulation=config.training.global_batch_size // (LOCAL_BATCH * dims.dp),
            dp_rank=rank // (dims.cp * dims.tp),
            dp_degree=dims.dp,
            settings=config.training.dataloader,
            skipped=SkippedSamples(config.training.skip_samples),
        )
        log = partial(append, run / "samples" / f"rank_{rank}.jsonl")
        for step in range(1, steps + 1):
            loader.on_sample = lambda number, tokens, log=log, step=step: log(
                step=step, number=number, tokens=tokens
            )
            next(loader)


def read_log(run: Path) -> dict[int, list[tuple[int, str, int, int]]]:
    """Return number, hash, rank and microbatch of each sample, by step."""
    logged = defaultdict(list)
    for path in (run / "samples").glob("rank_*.jsonl"):
        rank = int(path.stem.removeprefix("rank_"))
        num_drawn: Counter[int] = Counter()
        for row in map(json.loads, path.read_text().splitlines()):
            step, microbatch = row["step"], num_drawn[row["step"]] // LOCAL_BATCH
            num_drawn[step] += 1
            logged[step].append((row["index"], row["hash"], rank, microbatch))
    return logged


def contents(where: str) -> bytes:
    """Read what `where` names, by nothing of the library but the store."""
    file, _, number = where.rpartition(" ")
    file, _, kind = file.rpartition(" ")
    if kind == "line":
        row = json.loads(Path(file).read_text().splitlines()[int(number) - 1])
        return (row["text"] if "text" in row else row["prompt"] + row["completion"]).encode()
    if kind == "item":
        return json.loads(Path(file).read_text())[int(number) - 1]["text"].encode()
    if kind == "document":
        return bytes(TokenStore(file).document(int(number)).tolist())
    raw = Path(where).read_bytes()
    return gzip.decompress(raw) if where.endswith(".gz") else raw


def stretch_of(run: Path, step: int) -> Stretch:
    return next(s for s in read_history(run) if s.first_step <= step <= s.last_step)


def compare(run: Path) -> tuple[int, int]:
    """Compare logged steps with what is explained; return the numbers of samples and parts."""
    data = RunData(read_history(run)[-1].config)
    num_samples = num_parts = 0
    for step, rows in sorted(read_log(run).items()):
        stretch, said = stretch_of(run, step), []
        for k, parts in explain_step(stretch, step, data=data).items():
            ranks, microbatch = stretch.reader_of(k)
            said.append((k, data.hash(k), ranks[0], microbatch))
            check_parts(data.tokens(k).tolist(), parts, eos_id=data.tokenizer.eos_id)
            num_parts += len(parts)
        assert said == sorted(rows), f"step {step}"
        num_samples += len(said)
    return num_samples, num_parts


def check_parts(tokens: list[int], parts: list[tuple[str, Span]], *, eos_id: int) -> None:
    """Compare each part of a sample with the bytes of the document that it is said to be of."""
    at = 0
    for name, span in parts:
        assert span.at == at
        at += span.num_tokens
        # behind the last byte stands the end token; a store of the user's own may have none
        whole = [*contents(name), eos_id]
        assert tokens[span.at : at] == whole[span.first : span.first + span.num_tokens], name
    assert at == len(tokens) or "sft.jsonl line" in parts[-1][0]


@pytest.mark.promise("tools")
@pytest.mark.parametrize(
    ("kind", "world", "degrees"),
    [
        *(("mixed", 4, [CP]), ("split", 4, [PP]), ("packed", 4, [CP])),
        *(("gaps", 1, []), ("padded", 4, [PP])),
    ],
)
def test_40_steps_are_explained_as_they_were_logged(kind, world, degrees):
    drive(Path("run"), [*SETTINGS[kind], *degrees, CACHE], world=world, steps=40)
    num_samples, num_parts = compare(Path("run"))
    assert num_samples == 40 * 8
    assert num_parts > num_samples or kind == "padded"


@pytest.mark.promise("tools")
@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_steps_of_each_document_are_those_that_have_it(kind: str) -> None:
    drive(Path("run"), [*SETTINGS[kind], CACHE], world=2, steps=60)
    [stretch], data = read_history(Path("run")), RunData(load_config([CONFIG]))
    visits = defaultdict(list)
    for step in range(1, 61):
        for k, parts in explain_step(stretch, step, data=data).items():
            for name, span in parts:
                visits[name].append((step, k, span))
    assert any(len({step for step, *_ in seen}) > 1 for seen in visits.values())
    for name, expected in sorted(visits.items())[:: len(visits) // 8]:
        assert explain_document([stretch], name, data=data) == expected


@pytest.mark.parametrize("kind", ["mixed", "split", "packed"])
@pytest.mark.long
def test_a_real_run_that_goes_on_in_another_layout_with_another_batch(kind, ranks, tmp_path):
    # the ranks have another current folder
    there = [re.sub('"(?=[a-z])', f'"{tmp_path}/', part) for part in SETTINGS[kind]]
    job = [*SMALL, *there, f"--training.dataset_cache={tmp_path}/cache"]
    job += [f"--job.dump_folder={tmp_path}/run"]
    job += ["--checkpoint.enable", "--activation_checkpoint.mode=none"]
    job += ["--training.mixed_precision_param=float32", "--lr_scheduler.total_steps=20"]
    ranks.run(jobs.train, [*job, "--training.steps=3"], world=2)
    later = [CP, "--training.global_batch_size=12", "--checkpoint.mode=continue"]
    later += ["--training.skip_samples", "5-9", "30-40"]
    ranks.run(jobs.train, [*job, *later, "--training.steps=5"], world=2)
    run = tmp_path / "run"
    compare(run)
    logged = read_log(run)
    assert [len(logged[step]) for step in range(1, 6)] == [8, 8, 8, 12, 12]
    assert {rank for _, _, rank, _ in logged[1]} == {0, 1}
    numbers = sorted(number for step in logged.values() for number, *_ in step)
    assert numbers == [*range(30), *range(41, 59)]
    assert {rank for _, _, rank, _ in logged[5]} == {0}
    # without the first checkpoint its steps cannot be known for sure, and that is said
    shutil.rmtree(run / "checkpoint" / "step-3")
    assert stretch_of(run, 5).doubt


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    drive(Path("run"), [*SETTINGS["mixed"], CACHE], world=2, steps=4)
    assert main(["run", "--step", "2", "--text"]) == 0
    told = capsys.readouterr().out
    logged = read_log(Path("run"))[2]
    assert all(digest in told for _, digest, *_ in logged)
    [name] = re.findall(rf"sample {min(logged)[0]} .*\n  (.*): tokens", told)
    where = name.replace(" line ", ":").replace(" item ", ":").replace(" document ", ":")
    assert main(["run", "--document", where]) == 0
    assert f"step 2  sample {min(logged)[0]}  " in capsys.readouterr().out
    for arguments, said in (
        (["nowhere", "--step", "1"], "nowhere/config.toml"),
        (["run", "--step", "5"], "5"),
        (["run", "--document", "a.jsonl:9999"], "'a.jsonl line "),
    ):
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


def test_stored_settings_name_no_host_and_no_folder_that_is_written(monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    drive(Path("run"), [*SETTINGS["split"], CACHE], world=1, steps=4)
    stored = Path("run") / "config.toml"
    text = stored.read_text().replace('dataset_cache = "cache"', 'dataset_cache = "elsewhere"')
    stored.write_text(text)
    assert main(["run", "--step", "1"]) == 0
    assert "elsewhere" in text
    assert not Path("elsewhere").exists()
    url = 'dataset_path = ["http://127.0.0.1:9/a.jsonl"]'
    stored.write_text(re.sub(r"dataset_path = \[[^]]+\]", url, text))
    assert main(["run", "--step", "1"]) == 2
    assert "--fetch" in capsys.readouterr().err
    assert main(["run", "--step", "1", "--fetch"]) == 2
    assert "127.0.0.1" in capsys.readouterr().err


def test_data_that_changed_since_the_checkpoint_are_refused(ranks, tmp_path, capsys):
    job = jobs.write_job(tmp_path)
    text = tmp_path / "changing.txt"
    text.write_text("some words " * 200)
    job += ["--training.dataset=files", f"--training.dataset_path={text}", "--training.steps=1"]
    ranks.run(jobs.train, job, world=1)
    assert main([f"{tmp_path}/run", "--step", "1"]) == 0
    text.write_text("other words " * 200)
    assert main([f"{tmp_path}/run", "--step", "1"]) == 2
    assert "data changed" in capsys.readouterr().err
