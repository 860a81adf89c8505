"""The bundle has the wheels that a machine with torch and transformers lacks, within its size."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from scripts import bundle

PROJECT = {
    "dependencies": [
        "torch>=2.11,<2.16",
        "tokenizers>=0.21",
        "tomli>=2.0; python_version < '3.11'",
    ],
    "optional-dependencies": {"float8": ["torchao>=0.15"]},
}


def test_bundle_leaves_out_what_is_there() -> None:
    assert bundle.bundled(PROJECT) == [
        "tokenizers>=0.21",
        "tomli>=2.0; python_version < '3.11'",
        "torchao>=0.15",
    ]


@pytest.mark.parametrize(("mib", "code"), [(1, 0), (65, 1)])
def test_bundle_refuses_what_is_too_large(tmp_path: Path, mib: int, code: int) -> None:
    with (tmp_path / "one.whl").open("wb") as file:
        file.truncate(mib * 2**20)
    with patch("subprocess.run") as run:
        assert bundle.main([str(tmp_path)]) == code
    assert all("--no-deps" in call.args[0] for call in run.call_args_list)
