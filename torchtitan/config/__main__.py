"""Check a job and print it resolved: `python -m torchtitan.config --job.config_file F`.

Needs neither torch nor a GPU, so a job can be checked on the laptop where it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchtitan.base.errors import ConfigError
from torchtitan.config.load import load_config, to_toml


def main(argv: Sequence[str]) -> int:
    """Print the job as TOML and return 0, or one line for each mistake and return 2."""
    try:
        config = load_config(argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(to_toml(config))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
