"""Models of the Hugging Face Hub by name, such as Qwen/Qwen3-0.6B."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from torchtitan.base.errors import ConfigError

logger = logging.getLogger(__name__)
NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What is downloaded: no pickles, and no code."""


def is_name(path: str) -> bool:
    """Return whether a path is a name of the Hub. A folder of this machine comes first, also a
    missing one whose parent exists."""
    return NAME.fullmatch(path) is not None and not Path(path).parent.exists()


def download(name: str, *, key: str) -> Path:
    """Return a model's folder in the Hub's cache, downloaded first if necessary.

    Processes of one machine that need the same files wait for the one that downloads them. HF_HOME,
    HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE count. Raises ConfigError if there is no such model, or
    no access to it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    logger.info("%s is no folder here, so it is taken from the Hugging Face Hub", name)
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*FILES]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        rule = f"must be a folder, or a model of the Hugging Face Hub that you may read, got {name}"
        raise ConfigError.at(key, f"{rule}: {reason:.300}") from error
    logger.info("%s is in %s", name, folder)
    return folder
