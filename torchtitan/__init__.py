"""Train large language models in any layout from one TOML file."""

__version__ = "0.3.0.dev0"
