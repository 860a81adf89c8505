"""What looks like a URL is a supported one, or is refused: it never becomes a folder."""

from __future__ import annotations

import pytest

from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config

UNSUPPORTED = (
    "S3://bucket/Z",
    "s3:/bucket/Z",
    "simplecache::s3://bucket/Z",
    "dir::file:///tmp/Z",
    "zip://Z::s3://bucket/Z",
    "memory://Z",
    "reference://Z",
    "ftp://host/Z",
    " s3://bucket/Z",
)
OF_STORES = ("checkpoint.folder", "checkpoint.initial_load_path")
OF_PATHS = (
    "job.dump_folder",
    "model.tokenizer_path",
    "training.dataset_cache",
    "checkpoint.staging_folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "comm.save_traces_folder",
)


def refusal(key: str, value: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(["--checkpoint.enable", f"--{key}={value}"])
    return str(error.value)


@pytest.mark.parametrize("value", [*UNSUPPORTED, "https://host/Z"])
@pytest.mark.parametrize("key", OF_STORES)
def test_an_unsupported_url_is_refused_with_those_that_are(key: str, value: str) -> None:
    said = refusal(key, value)
    assert key in said
    assert value in said
    assert "s3://, s3a://, gs://" in said


@pytest.mark.parametrize("value", [*UNSUPPORTED, "s3://bucket/Z", "file:///tmp/Z"])
@pytest.mark.parametrize("key", OF_PATHS)
def test_where_a_path_is_needed_every_url_is_refused(key: str, value: str) -> None:
    said = refusal(key, value)
    assert key in said
    assert value in said


@pytest.mark.promise("object-stores")
def test_a_password_is_not_shown() -> None:
    assert "secret" not in refusal("checkpoint.folder", "ftp://me:secret@host/Z")
