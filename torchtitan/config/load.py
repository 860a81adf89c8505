"""Settings of a job, in and out: files and command line to Config, Config to TOML.

Where a value comes from is settled by order alone: the base file, the file, the command line, each
over the one before. Environment variables are left out on purpose: a run's config.toml says it all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tomli_w

from torchtitan.base.errors import ConfigError
from torchtitan.config.build import build
from torchtitan.config.cli import read_command_line
from torchtitan.config.fields import values_of
from torchtitan.config.layers import Layer
from torchtitan.config.toml_files import CONFIG_FILE, read_layers
from torchtitan.job import Config

__all__ = ["load_config", "to_toml"]

logger = logging.getLogger(__name__)


def load_config(argv: Sequence[str]) -> Config:
    """Read the file that --job.config_file names, apply the other options, check everything.

    Raises ConfigError with every mistake of files and command line; prints the help and raises
    SystemExit(0) on --help. Old spellings are logged as warnings.
    """
    options, stray = read_command_line(argv)
    layers: list[Layer] = []
    unread: list[str] = []
    file = options.get(CONFIG_FILE)
    if file is not None and file.value is not None:
        try:
            layers = read_layers(file)
        except ConfigError as error:
            unread = [str(mistake) for mistake in error.mistakes]
    built = build([*layers, options], check_rules=not unread)
    for notice in built.notices:
        logger.warning(notice)
    mistakes = [*unread, *stray, *built.mistakes]
    if mistakes:
        raise ConfigError(mistakes)
    return built.config


def to_toml(config: Config) -> str:
    """Write the resolved settings; loading them gives an equal Config but for job.config_file."""
    tables: dict[str, Any] = {}
    for path, value in values_of(config).items():
        if value is None or path == CONFIG_FILE:
            continue
        table = tables
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = list(value) if isinstance(value, tuple) else value
    return tomli_w.dumps(tables)
