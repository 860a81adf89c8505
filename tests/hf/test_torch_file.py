"""`convert from-torch`: spellings of one model in a file of torch.save, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.models.reference import VARIANTS, random_decoder, reference_of
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.source import ALL
from torchtitan.checkpoint.start import open_step
from torchtitan.hf.names import Names
from torchtitan.models.families import MODELS
from torchtitan.tools.dcp_folder import from_torch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.promise("round-trip")
@pytest.mark.parametrize("variant", ["grouped", "tied"])
@pytest.mark.parametrize("spelling", ["ours", "under model", "meta", "hugging face"])
def test_every_spelling_is_the_same_model(spelling: str, variant: str, tmp_path: Path) -> None:
    model = random_decoder(VARIANTS[variant])
    content: dict[str, object] = dict(model.state_dict())
    if spelling == "under model":
        content = {"model": content, "step": 3}
    if spelling == "meta":
        content["rope.freqs"] = torch.ones(4)
    if spelling == "hugging face":  # a tied head is there twice
        content = dict(reference_of(model).state_dict())
        content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    torch.save(content, tmp_path / "model.pth")
    from_torch(tmp_path / "model.pth", tmp_path / "weights")
    spec = MODELS["llama3"]
    source = open_step(
        tmp_path / "weights",
        settings=CheckpointConfig(),
        spec=spec,
        rope_heads=Names(spec.hf, model.config).rope_heads,
        filter=ALL,
        group=None,
    )
    weights = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    source.read(weights)
    for name, weight in model.named_parameters():
        assert torch.equal(weights[name], weight), name


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, ("/tmp/never",))


@pytest.mark.promise("no-code-from-checkpoints")
def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    file, state = tmp_path / "model.pt", {"norm.weight": torch.ones(32)}
    cases: list[tuple[object, re.Pattern[str]]] = [
        ({**state, "step": 7}, naming("step")),
        ({"norm.weight": torch.ones(32).to_sparse()}, naming("norm.weight")),
        ({"norm.weight": torch.ones(32).to("meta")}, naming("norm.weight")),
        ([torch.ones(2)], naming(file)),
        ({**state, "evil": Evil()}, naming("io.open")),
    ]
    for content, said in cases:
        torch.save(content, file)
        with pytest.raises(CheckpointError, match=said):
            from_torch(file, tmp_path / "out")
    torch.save(state, file)
    file.write_bytes(file.read_bytes()[:-500])
    for path in (file, tmp_path / "nowhere.pt"):
        with pytest.raises(CheckpointError, match=naming(path)):
            from_torch(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
