"""Steps whose loss or gradient norm jumps: they are skipped, or their gradients clipped.

A figure spikes when it is above the robust bound of the last `window` steps,

    median + deviations * max(1.4826 * MAD, median / 100)

where MAD is the median absolute deviation, and 1.4826 MAD the standard deviation of a normal
distribution (Rousseeuw and Croux, 1993). The hundredth keeps the bound above figures that hardly
vary. The first `window` steps have no bound. Every finite figure enters the window, spikes too: a
few do not move the median, and a lasting level becomes the normal one after half a window, so that
no run skips steps forever.

The figures are sums over all ranks, with the same bits on each, so all ranks decide alike. They
decide on the device, and the host reads the decision while the device works on the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.device import HostCopy
from torchtitan.optim.settings import SpikesConfig

logger = logging.getLogger(__name__)
FIGURES = ("loss", "grad_norm")
PER_DEVIATION = 1.4826
LEAST_DEVIATION = 0.01
"""Relative to the median."""
OnSpike = Callable[[int, str, float, float, str], None]
"""Takes the step, the name of the figure, its value, its bound and what was done."""


def robust_bounds(last_FW: Tensor, *, deviations: float) -> tuple[Tensor, Tensor]:
    """Return the medians and the bounds (F,) of the last W values of F figures, oldest first.

    The bounds are infinite as long as the oldest value is, before W values exist.
    """
    # the upper median of an even number
    middle = last_FW.shape[1] // 2
    median_F = last_FW.sort(1).values[:, middle]
    mad_F = (last_FW - median_F[:, None]).abs().sort(1).values[:, middle]
    deviation_F = torch.maximum(PER_DEVIATION * mad_F, LEAST_DEVIATION * median_F.abs())
    bound_F = median_F + deviations * deviation_F
    return median_F, torch.where(last_FW[:, 0].isfinite(), bound_F, torch.inf)


class SpikeDetector:
    """Detects spikes, and skips or clips their steps.

    `equal_ranks` hold the same losses. `on_spike` is called for each spike one step later, on this
    rank.
    """

    def __init__(
        self,
        settings: SpikesConfig,
        *,
        equal_ranks: int,
        device: torch.device,
        on_spike: OnSpike | None = None,
    ) -> None:
        self._settings, self._equal_ranks, self._on_spike = settings, equal_ranks, on_spike
        shape = len(FIGURES), settings.window
        self._last_FW = torch.full(shape, torch.inf, dtype=torch.float64, device=device)
        self._num_spikes = torch.zeros((), dtype=torch.int64, device=device)
        self._pending: tuple[HostCopy, int] | None = None

    @torch.no_grad()
    def check(
        self, step: int, *, loss_sum: Tensor, divisor: Tensor, norm: Tensor, max_norm: float
    ) -> tuple[Tensor, Tensor | float]:
        """Return the norm for `optimizer_step`, infinite to skip the step, and the norm to clip at.

        All ranks must call this.

        `loss_sum` is this rank's, `divisor` the number of valid tokens in the global batch, `norm`
        the global gradient norm before clipping, `max_norm` the norm to clip at without a spike.
        """
        self.log_pending()
        total = loss_sum.double().clone()  # `loss_sum` is still to be reported
        dist.all_reduce(total)
        now_F = torch.stack([total / self._equal_ranks / divisor, norm.double()])
        median_F, bound_F = robust_bounds(self._last_FW, deviations=self._settings.deviations)
        spikes_F = now_F > bound_F
        is_spike = spikes_F.any() & now_F.isfinite().all()
        self._pending = HostCopy(torch.cat([spikes_F.double() * is_spike, now_F, bound_F])), step
        newer_FW = torch.cat([self._last_FW[:, 1:], now_F[:, None]], 1)
        self._last_FW.copy_(torch.where(now_F.isfinite().all(), newer_FW, self._last_FW))
        self._num_spikes += is_spike
        if self._settings.action == "clip":
            smaller = median_F[1].clamp(max=max_norm).to(norm.dtype)
            return norm, torch.where(is_spike, smaller, torch.full_like(norm, max_norm))
        return torch.where(is_spike, torch.inf, norm), max_norm

    def log_pending(self) -> None:
        """Log a spike of the last step, unless that was done."""
        if self._pending is None:
            return
        (on_host, step), self._pending = self._pending, None
        values = on_host.read()
        n = len(FIGURES)
        done = "left out" if self._settings.action == "skip" else "clipped to the median norm"
        for name, is_spike, value, bound in zip(
            FIGURES, values[:n], values[n : 2 * n], values[2 * n :], strict=True
        ):
            if is_spike:
                figure = f"its {name} of {value:.6g} is above the bound of {bound:.6g}"
                logger.warning("Step %d is %s: %s", step, done, figure)
                if self._on_spike is not None:
                    self._on_spike(step, name, value, bound, self._settings.action)

    def state(self) -> dict[str, Tensor]:
        """Return the state for checkpoints, which may be filled in place."""
        window = self._settings.window  # in the name, so that another window starts from scratch
        return {f"spikes.last_{window}": self._last_FW, "spikes.number": self._num_spikes}

    def figures(self) -> dict[str, Tensor]:
        """Return the number of spikes so far, on the device."""
        return {"spikes": self._num_spikes}
