"""Preferences: of two answers to a prompt the chosen one becomes more likely than the rejected one.

A loss is a function of the summed log-probabilities of both answers. The gradient of a sum is one
number for all its tokens, so the head computes the log-probability of each token, chunk by chunk,
and in backward again with that number (`optim/loss.py`): no logits are kept, and the parts of the
vocabulary on the ranks of `tp` are never gathered.

Both answers of a pair are documents of one sample, so they meet on every rank of a layout but those
of `cp`, which add their parts of the sums. The loss is summed over pairs, and divided by the pairs
of the global batch.

The reference of a loss is the model that the run starts from. Its log-probabilities are computed
once, before the first step, and are saved with the state of the run.

Shapes: B samples, S tokens of this rank, H answers of a sample, P = H / 2 pairs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.base.log import plural
from torchtitan.data.dataset import Dataset
from torchtitan.data.loader import MapSamples
from torchtitan.finetune.data import UNKNOWN, PairSource
from torchtitan.models.interface import HeadLoss
from torchtitan.optim.loss import IGNORE_INDEX

logger = logging.getLogger(__name__)
OPTIONS = "training.loss_options"
UNIT = 2.0**-32
"""Of references, in nats: labels are integers, and references travel with them."""


@dataclass(frozen=True)
class Answers:
    """The chosen or the rejected answers of pairs, (B, P) in float64."""

    log_prob: Tensor
    """Sum over its labels."""
    reference: Tensor
    """The same sum of the reference."""
    length: Tensor
    """Number of its labels."""

    @property
    def mean(self) -> Tensor:
        """Log-probability per label."""
        return self.log_prob / self.length

    @property
    def ratio(self) -> Tensor:
        """Logarithm of the probability over the reference's."""
        return self.log_prob - self.reference


Rewarded = tuple[Tensor, Tensor, Tensor]
"""The loss of each pair, and the rewards of both answers."""


def dpo(
    chosen: Answers, rejected: Answers, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> Rewarded:
    """Direct preference optimization (arXiv:2305.18290, equation 7), with the chance that a label
    is wrong (https://ericmitchell.ai/cdpo.pdf)."""
    rewards = beta * chosen.ratio, beta * rejected.ratio
    margin = rewards[0] - rewards[1]
    right, wrong = -F.logsigmoid(margin), -F.logsigmoid(-margin)
    return (1 - label_smoothing) * right + label_smoothing * wrong, *rewards


def ipo(chosen: Answers, rejected: Answers, *, beta: float = 0.1) -> Rewarded:
    """Identity preference optimization (arXiv:2310.12036, equation 17), per label as TRL has it."""
    ratios = chosen.ratio / chosen.length, rejected.ratio / rejected.length
    loss = (ratios[0] - ratios[1] - 1 / (2 * beta)).square()
    return loss, beta * ratios[0], beta * ratios[1]


def simpo(chosen: Answers, rejected: Answers, *, beta: float = 2.0, gamma: float = 1.0) -> Rewarded:
    """Simple preference optimization, without a reference (arXiv:2405.14734, equation 6)."""
    rewards = beta * chosen.mean, beta * rejected.mean
    return -F.logsigmoid(rewards[0] - rewards[1] - gamma), *rewards


def orpo(chosen: Answers, rejected: Answers, *, beta: float = 0.1) -> Rewarded:
    """Odds ratio preference optimization, without a reference (arXiv:2403.07691, equations 3 to 7):
    the cross-entropy per label of the chosen answer, plus beta times the ratio's loss."""
    # a probability that rounds to 1 would have infinite odds
    means = (answers.mean.clamp(max=-UNIT) for answers in (chosen, rejected))
    odds = [mean - torch.log(-torch.expm1(mean)) for mean in means]
    loss = -chosen.mean - beta * F.logsigmoid(odds[0] - odds[1])
    return loss, beta * chosen.mean, beta * rejected.mean


Function = Callable[[Answers, Answers], Rewarded]
FUNCTIONS = {function.__name__: function for function in (dpo, ipo, simpo, orpo)}
"""By `training.loss`."""
HAVE_REFERENCE = ("dpo", "ipo")


def find_function(name: str, options: Mapping[str, Any]) -> Function:
    """Return the loss of pairs with its options; raise ConfigError for one that it lacks."""
    function: Callable[..., Rewarded] = FUNCTIONS[name]
    names = [*inspect.signature(function).parameters][2:]
    for key, value in options.items():
        if key not in names:
            rule = f"must be of {', '.join(names)} for {name}{did_you_mean(key, names)}"
            raise ConfigError.at(OPTIONS, f"{rule}, got '{key}'")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0 or (key == "beta" and not value):
            rule = f"{key} must be a number > 0, or for gamma and label_smoothing >= 0"
            raise ConfigError.at(OPTIONS, f"{rule}, got {value!r:.60}")
        if key == "label_smoothing" and value >= 0.5:
            raise ConfigError.at(OPTIONS, f"label_smoothing must be < 0.5, got {value}")
    return partial(function, **options)


class PreferenceLoss:
    """The loss of a head: from its input, its weight and targets (B, S, 4) to the sum over pairs.

    `log_loss` computes the cross-entropy of each token, `group` has the ranks with parts of the
    same samples, or is None. `figures` are of what was computed since `begin`.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        log_loss: HeadLoss,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._function, self._has_reference = find_function(name, options), name in HAVE_REFERENCE
        self._log_loss, self._group, self._device = log_loss, group, device
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._sums = torch.zeros(6, dtype=torch.float64, device=device)
        self._recorded: list[Tensor] | None = None
        """While references are computed: of each pair its number and log-probabilities."""
        self._sources = dict[str, PairSource]()

    def find_references(self, datasets: Mapping[str, MapSamples]) -> dict[str, Tensor]:
        """Return what a checkpoint saves: the references of the pairs of each dataset, by its name
        and a hash of its data, as they belong to no other data."""
        if self._has_reference:
            for name, dataset in datasets.items():
                assert isinstance(dataset, Dataset)
                text = json.dumps(dataset.fingerprint, sort_keys=True)
                digest = hashlib.sha256(text.encode()).hexdigest()[:16]
                for number, source in enumerate(dataset.sources):
                    assert isinstance(source, PairSource)
                    self._sources[f"{name}.{number}.{digest}"] = source
        return {name: source.references for name, source in self._sources.items()}

    def compute_references(self, *, step: int, evaluate: Callable[[Dataset], None]) -> None:
        """Compute the references that no checkpoint had, from the model as it is. Collective.

        `evaluate` computes the loss of each sample of a dataset. Raises ConfigError if the model
        was trained already, for `step` steps.
        """
        for name, source in self._sources.items():
            if not (source.references == UNKNOWN).any():
                continue
            if step:
                rule = f"the checkpoint of step {step} has no log-probabilities of the model that "
                rule += f"the run started from, for {name}"
                raise ConfigError(f"{rule}; start a new run with that model")
            began = time.perf_counter()
            logger.info("Computing the reference of %s", plural(source.num_samples, "sample"))
            self._recorded = []
            evaluate(Dataset([source], seed=0, num_epochs=1, fingerprint={}))
            fill_references(source.references, self._recorded, device=self._device)
            self._recorded = None
            logger.info("Computed it in %.1f s", time.perf_counter() - began)

    def begin(self) -> None:
        """Forget the figures."""
        self._sums.zero_()

    def figures(self) -> dict[str, Tensor]:
        """Return means over pairs, named as TRL names them, and over tokens. Collective."""
        sums = self._sums.clone()
        dist.all_reduce(sums)  # ranks that hold the same pairs weigh the same
        chosen, rejected, right = (sums[:3] / sums[3]).unbind()
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": right,
            "valid_token_fraction": sums[4] / sums[5],
        }

    def __call__(self, x_BSC: Tensor, weight_VC: Tensor, targets_BS4: Tensor) -> Tensor:
        """Return the sum of the losses of the pairs, of which each rank of `group` has a share."""
        labels_BS, answers_BS, references_BS, pairs_BS = targets_BS4.unbind(-1)
        losses_BS = self._log_loss(x_BSC, weight_VC, labels_BS)
        # an answer has a label at least, so a sample has no more answers than tokens
        num = (self._ranks * labels_BS.shape[1] + 1) // 2 * 2
        is_first_BS = pairs_BS != IGNORE_INDEX
        parts_4BS = torch.stack(
            [
                -losses_BS.double(),
                references_BS * UNIT,
                (labels_BS != IGNORE_INDEX).double(),
                torch.where(is_first_BS, pairs_BS + 1, 0).double(),
            ]
        )
        index_4BS = answers_BS.clamp(min=0).expand_as(parts_4BS)
        sums_4BH = parts_4BS.new_zeros(*parts_4BS.shape[:2], num)
        sums_4BH = sums_4BH.scatter_add(2, index_4BS, parts_4BS)
        if self._group is not None:
            whole_4BH = sums_4BH.detach().clone()
            dist.all_reduce(whole_4BH, group=self._group)
            # its own part has the gradient
            sums_4BH = whole_4BH + (sums_4BH - sums_4BH.detach())
        log_prob_BH, reference_BH, length_BH, number_BH = sums_4BH
        is_pair_BP = number_BH[:, ::2] > 0
        # where there is no answer, any numbers with a finite loss
        log_prob_BH = log_prob_BH.where(length_BH > 0, -1.0)
        fields_3BH = log_prob_BH, reference_BH, length_BH.clamp(min=1)
        chosen, rejected = (Answers(*(x_BH[:, i::2] for x_BH in fields_3BH)) for i in range(2))
        loss_BP, *rewards = self._function(chosen, rejected)
        summed = loss_BP.where(is_pair_BP, 0.0).sum()
        chosen_BP, rejected_BP = (reward.detach() for reward in rewards)
        of_pairs = (chosen_BP, rejected_BP, chosen_BP > rejected_BP, is_pair_BP)
        of_tokens = labels_BS != IGNORE_INDEX, torch.ones_like(labels_BS)
        sums = [x_BP.where(is_pair_BP, 0).double().sum() for x_BP in of_pairs]
        self._sums += torch.stack(sums + [x_BS.double().sum() for x_BS in of_tokens])
        if self._recorded is not None:
            numbered = torch.stack([number_BH[:, ::2] - 1, chosen.log_prob, rejected.log_prob])
            self._recorded.append(numbered.detach()[:, is_pair_BP])
        # the trainer adds the sums of all ranks; each rank has the gradient of its own tokens
        return summed - summed.detach() * (1 - 1 / self._ranks)


def fill_references(
    references: Tensor, recorded: Iterable[Tensor], *, device: torch.device
) -> None:
    """Set the references of the answers of all ranks, two per pair, in place. Collective."""
    log_probs = torch.full((len(references),), -torch.inf, dtype=torch.float64, device=device)
    for pairs, *answers in recorded:
        for i, log_prob in enumerate(answers):
            log_probs[2 * pairs.long() + i] = log_prob
    dist.all_reduce(log_probs, dist.ReduceOp.MAX)
    log_probs = log_probs.where(log_probs.isfinite(), 0.0)  # of pairs that no sample has
    references.copy_((log_probs / UNIT).round())
