"""Single files of weights: three spellings of one model, and what is refused."""

from __future__ import annotations

import random
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.reference import VARIANTS, random_decoder, reference_of
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.hf.file import map_file, open_file
from torchtitan.hf.names import Names
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.sizes import DecoderConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
GROUPED = VARIANTS["grouped"]


def read(file: Path, config: DecoderConfig = GROUPED) -> dict[str, Tensor]:
    model = Decoder(config)
    found = open_file(file, spec=MODELS["llama3"], architecture=config, group=None)
    found.read({n: p.detach() for n, p in model.named_parameters()})
    return dict(model.state_dict())


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
    found = read(tmp_path / "model.pth", VARIANTS[variant])
    for name, weight in model.state_dict().items():
        assert torch.equal(found[name], weight), name


def test_the_order_of_rows_is_never_guessed(tmp_path: Path) -> None:
    """By our names a Qwen3 may be torchtitan's, in halves, or of this library."""
    config = VARIANTS["normed heads"]
    model, file = random_decoder(config), tmp_path / "model.pt"
    ours = dict(model.state_dict())
    theirs = dict(reference_of(model).state_dict())
    names = {Names(MODELS["qwen3"].hf, config).to_hf(name): name for name in ours}
    settings: dict[str, Any] = {"spec": MODELS["qwen3"], "architecture": config, "group": None}
    in_halves = {names[name]: tensor for name, tensor in theirs.items()}
    for rope, content in (("interleaved", ours), ("halves", in_halves), ("auto", theirs)):
        torch.save(content, file)
        into = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        open_file(file, rope=rope, **settings).read(into)
        assert all(torch.equal(into[name], ours[name]) for name in ours), rope
    with pytest.raises(CheckpointError, match=naming("initial_load_rope", "interleaved")):
        open_file(file, rope="interleaved", **settings)
    torch.save(ours, file)
    with pytest.raises(CheckpointError, match=naming("checkpoint.initial_load_rope", "halves")):
        open_file(file, **settings)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, ("/tmp/never",))


@pytest.mark.promise("no-code-from-checkpoints")
def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    state = dict(random_decoder(GROUPED).state_dict())
    without = {n: t for n, t in state.items() if n != "norm.weight"}
    cases: list[tuple[object, re.Pattern[str]]] = [
        (without, naming("norm.weight")),
        ({**state, "extra": torch.ones(2)}, naming("extra")),
        ({**state, "norm.weight": torch.ones(3)}, naming("norm.weight", [3], [32])),
        (
            {**state, "norm.weight": torch.ones(32).to(torch.int8)},
            naming("norm.weight", "torch.int8"),
        ),
        ({**state, "step": 7}, naming("step")),
        ({**state, "norm.weight": torch.ones(32).to_sparse()}, naming("norm.weight")),
        ({**state, "norm.weight": torch.ones(32).to("meta")}, naming("norm.weight")),
        ([torch.ones(2)], naming("[tensor([1., 1.])]")),
        ({}, naming(file)),
        ({**state, "evil": Evil()}, naming("io.open")),
        (
            {**state, "model.norm.weight": torch.ones(32)},
            naming("norm.weight", "model.norm.weight"),
        ),
    ]
    for content, said in cases:
        torch.save(content, file)
        with pytest.raises(CheckpointError, match=said):
            read(file)
    torch.save(state, file)
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=naming(file)):
        read(file)
    with pytest.raises(CheckpointError, match=naming(tmp_path / "nowhere.pt")):
        read(tmp_path / "nowhere.pt")
    torch.save(state, file)
    tied = VARIANTS["tied"]
    with pytest.raises(CheckpointError, match=naming("output.weight")):
        read(file, tied)  # a head of its own is not lost unseen


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_an_archive_packed_again_gives_its_weights_or_is_refused(
    method: int, tmp_path: Path
) -> None:
    """Mapped, the bytes of a compressed record would be taken for weights."""
    file, again = tmp_path / "model.pt", tmp_path / "again.pt"
    torch.save({"a": torch.tensor([1.5, 2.5]).repeat(100)}, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(again, "w", method) as new:
        for record in old.namelist():
            new.writestr(record, old.read(record))
    if method == zipfile.ZIP_STORED:
        assert map_file(again)["a"][:2].tolist() == [1.5, 2.5]
        return
    with pytest.raises(CheckpointError, match=naming(again)):
        map_file(again)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_whatever_damaged_bytes_come_to_is_a_typed_error(tmp_path: Path) -> None:
    """Any other error would end rank 0 alone, and leave the others waiting for it."""
    file = tmp_path / "model.pt"
    torch.save(dict(random_decoder(GROUPED).state_dict()), file)
    whole = file.read_bytes()
    start = whole.find(b"data.pkl") + 100
    draws, kinds = random.Random(0), set()
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[start + draws.randrange(600)] = draws.randrange(256)
        file.write_bytes(damaged)
        try:
            map_file(file)
        except CheckpointError as error:
            kinds.add(type(error.__cause__))
    assert KeyError in kinds
