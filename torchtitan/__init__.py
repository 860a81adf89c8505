"""Train large language models in any layout from one TOML file.

`torchtitan.api` holds what Python code may use, found here by its name. It is imported when first
asked for: a command should not wait for torch before it can name a mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan.api import Config as Config
    from torchtitan.api import Result as Result
    from torchtitan.api import UserError as UserError
    from torchtitan.api import chat as chat
    from torchtitan.api import generate as generate
    from torchtitan.api import load_config as load_config
    from torchtitan.api import load_generator as load_generator
    from torchtitan.api import load_model as load_model
    from torchtitan.api import load_tokenizer as load_tokenizer
    from torchtitan.api import train as train

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Result",
    "UserError",
    "chat",
    "generate",
    "load_config",
    "load_generator",
    "load_model",
    "load_tokenizer",
    "train",
]


if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from torchtitan import api

        # importing api has set the modules `train` and `generate` under these names
        globals().update({public: getattr(api, public) for public in __all__})
        return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *__all__]
