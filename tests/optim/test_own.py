"""An optimizer of the user's own: Lion against its paper's formula, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.own_optimizer import Lion
from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.optim.loss import find_loss
from torchtitan.optim.optimizer import build_optimizer, check_optimizer
from torchtitan.optim.schedule import find_decay, set_lr
from torchtitan.optim.settings import OptimizerConfig

NAME = "examples.own_optimizer:Lion"


@pytest.mark.promise("nobody-forks")
def test_it_follows_its_formula_in_the_groups_of_ours() -> None:
    net = nn.Linear(3, 2)
    settings = OptimizerConfig(
        name=NAME,
        lr=0.1,
        weight_decay=0.2,
        options={"betas": [0.5, 0.8]},
        no_decay_params=("bias",),
    )
    check_optimizer(settings, trained=dict(net.named_parameters()))
    optimizer = build_optimizer(net, settings=settings)
    assert isinstance(optimizer, Lion)
    expected = {name: (p.detach().double(), torch.zeros(())) for name, p in net.named_parameters()}
    for step in range(1, 4):
        set_lr(optimizer, 0.1 / step)
        for name, p in net.named_parameters():
            p.grad = torch.full_like(p, -1.0 if step == 2 else 0.5)
            x, m = expected[name]
            g, decay = p.grad.double(), 0.2 if name == "weight" else 0.0
            x = x - 0.1 / step * (torch.sign(0.5 * m + 0.5 * g) + decay * x)
            expected[name] = x, 0.8 * m + 0.2 * g
        optimizer.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name][0], rtol=1e-6, atol=1e-7)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("my_optim", None)


STEP = """
from examples.own_optimizer import Lion
import torch
class O(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
"""
WRONG = {
    "no optimizer": (
        "def O(params, lr, weight_decay): return 3",
        {},
        "name",
        "torch.optim.Optimizer",
    ),
    "state that is no tensor": (
        STEP
        + " " * 16
        + "self.state[p]['n'] = 1 + self.state[p].get('n', 0)\n"
        + " " * 16
        + "p.sub_(group['lr'] * p.grad)",
        {},
        "name",
        "'n'",
    ),
    "state that begins with ones": (
        STEP
        + " " * 16
        + "s = self.state[p].setdefault('s', torch.ones_like(p))\n"
        + " " * 16
        + "p.sub_(group['lr'] * p.grad / s)\n"
        + " " * 16
        + "s.mul_(0.5).add_(p.grad * p.grad)",
        {},
        "name",
        "zeros",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case: str, folder: Path) -> None:
    code, options, key, said = WRONG[case]
    (folder / "my_optim.py").write_text(code)
    settings = OptimizerConfig(name="my_optim:O", options=options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        check_optimizer(settings, trained={"w": torch.zeros(2, 2)})
    [mistake] = error.value.mistakes
    assert f"optimizer.{key}" in mistake.keys  # type: ignore[union-attr]
    assert said in str(mistake)


FAILING = """
from examples.own_optimizer import Lion

def losses(logits, labels):
    return {}[0]

def decay(progress):
    return {}[0]

class Failing(Lion):
    num_steps = 0

    def step(self, closure=None):
        Failing.num_steps += 1
        return {}[0] if Failing.num_steps > 4 else super().step()
"""


def test_errors_of_custom_code_name_their_setting_while_it_trains(folder: Path) -> None:
    (folder / "my_optim.py").write_text(FAILING)
    net, settings = nn.Linear(2, 3), OptimizerConfig(name="my_optim:Failing", lr=0.1)
    check_optimizer(settings, trained=dict(net.named_parameters()))
    optimizer = build_optimizer(net, settings=settings)
    losses = find_loss("my_optim:losses", {})
    assert losses is not None
    decay = find_decay("my_optim:decay", {})
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    failing = {
        "optimizer.name": optimizer.step,
        "training.loss": lambda: losses(torch.ones(2, 3), torch.ones(2)),
        "lr_scheduler.decay_type": lambda: decay(0.5),
    }
    for key, fails in failing.items():
        with pytest.raises(
            ConfigError, match=naming(key.rpartition(".")[2], "my_optim", "KeyError")
        ):
            fails()
