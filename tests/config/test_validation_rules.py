"""Rules of [validation] and of keep_best: each broken one, and what lies just inside."""

from __future__ import annotations

import pytest

from tests.config.jobs import Jobs

ON = "[validation]\nenable = true\n"
SYNTHETIC = '\n[training]\ndataset = "synthetic"\n'
PIPELINE = "\n[parallelism]\npipeline_parallel_degree = 2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ON,
            '[validation] enable = true: needs data of its own: training reads all of "python_'
            'stdlib"; hold out a part of it with validation.split = 0.05 and no dataset, or',
        ),
        (
            f'{ON}dataset = "files"',
            '[validation] dataset = "files": "files" needs validation.dataset_path, the files to '
            "read; or hold out a part of the training's documents with validation.split = 0.05",
        ),
        # they are held out without enable too
        (
            '[validation]\nsplit = 0.1\ndataset = "synthetic"',
            "[validation] split = 0.1: holds out documents of the training's data, and cannot be "
            "given together with dataset or dataset_path; remove either",
        ),
        (
            f'{ON}split = 0.1\ndataset_path = "x"',
            "[validation] split = 0.1: holds out documents of the training's data, and cannot be",
        ),
        ("[validation]\nsplit = 0", "[validation] split = 0: must be greater than 0"),
        ("[validation]\nsplit = 1.0", "[validation] split = 1.0: must be less than 1"),
        ("[validation]\nsplit = nan", "[validation] split = nan: must be less than 1"),
        ('[validation]\nsplit = "5%"', '[validation] split = "5%": must be a number'),
        (
            f'{ON}\n[training]\ndataset = "examples"\ndataset_path = "x"',
            '[validation] enable = true: "examples" needs validation.dataset_path, the files',
        ),
        (
            f'{ON}dataset_path = "x"{SYNTHETIC}',
            '[validation] dataset_path = "x": is read only with dataset = "files" or "examples", '
            'got "synthetic"; change or remove',
        ),
        (
            f"{ON}steps = 0{SYNTHETIC}",
            "[validation] steps = 0: must be -1 (all samples, each once) or at least 1, got 0",
        ),
        (
            f"{ON}seq_len = 9{SYNTHETIC}[parallelism]\ntensor_parallel_degree = 2",
            "[validation] seq_len = 9: seq_len must be a multiple of 2 (tensor_parallel_degree 2 "
            "under sequence parallelism), got 9; try 8",
        ),
        (
            f"{ON}seq_len = 6{SYNTHETIC}[parallelism]\ncontext_parallel_degree = 2",
            "[validation] seq_len = 6: seq_len must be a multiple of 4 (context_parallel_degree 2 "
            "x 2 chunks a rank under headtail), got 6; try 4",
        ),
        (
            f"{ON}local_batch_size = 3{SYNTHETIC}{PIPELINE}pipeline_parallel_microbatch_size = 2",
            "[validation] local_batch_size = 3: must be a multiple of the 2 samples of a "
            "pipeline's microbatch, got 3; try 2",
        ),
        (
            f"{ON}local_batch_size = 3{SYNTHETIC}{PIPELINE}pipeline_parallel_num_microbatches = 4",
            "[validation] local_batch_size = 3: must be a multiple of the 2 samples of a",
        ),
        (
            f"{ON}{SYNTHETIC}[validation.dataloader]\npersistent_workers = true",
            "[validation.dataloader] persistent_workers = true: needs worker processes, got",
        ),
        (
            "[checkpoint]\nenable = true\nkeep_best = 2",
            "[checkpoint] keep_best = 2: keeps the checkpoints of lowest validation loss and needs "
            "validation.enable = true, got keep_best = 2",
        ),
        (
            f"{ON}{SYNTHETIC}[checkpoint]\nkeep_best = 2",
            "[checkpoint] keep_best = 2: needs checkpoint.enable = true",
        ),
    ],
)
def test_broken_rules(jobs: Jobs, text: str, message: str) -> None:
    [mistake] = jobs.mistakes(text)
    assert mistake.startswith(f"job.toml: {message}")


@pytest.mark.parametrize(
    "text",
    [
        # nothing is validated, so nothing has to fit
        '[validation]\ndataset = "files"\nsteps = 0',
        f"{ON}{SYNTHETIC}",
        f'{ON}dataset = "synthetic"\nsteps = 1',
        f'{ON}dataset = "python_stdlib"{SYNTHETIC}',
        f"{ON}split = 0.05",
        f"{ON}split = 0.999{SYNTHETIC}",
        "[validation]\nsplit = 1e-9",
        f'{ON}dataset_path = "x"\n[training]\ndataset = "files"\ndataset_path = "y"',
        f"{ON}seq_len = 8{SYNTHETIC}[parallelism]\ncontext_parallel_degree = 2",
        f"{ON}seq_len = 9{SYNTHETIC}[parallelism]\ntensor_parallel_degree = 2\n"
        "enable_sequence_parallel = false",
        f"{ON}local_batch_size = 4{SYNTHETIC}{PIPELINE}pipeline_parallel_microbatch_size = 2",
        f"{ON}{SYNTHETIC}[checkpoint]\nenable = true\nkeep_best = 1",
    ],
)
def test_just_inside_the_rules(jobs: Jobs, text: str) -> None:
    jobs.load(text)
