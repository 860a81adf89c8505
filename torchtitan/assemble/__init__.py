"""From the settings and this rank's place to everything the trainer holds.

run.py      straight down, each part built by one call
data.py     what a rank reads
model.py    which model: a flavor, own sizes, or a Hugging Face folder's
find.py     over which ranks, and what does not fit together
resume.py   from which checkpoint, and what the next start will compare itself with
generator.py  a model that generates text, from a run or from Hugging Face
validation.py   what the run is measured on
"""

from __future__ import annotations

from torchtitan.assemble.model import find_model
from torchtitan.assemble.run import assemble
from torchtitan.trajectory import CONFIG_FILE

__all__ = ["CONFIG_FILE", "assemble", "find_model"]
