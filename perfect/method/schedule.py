r"""The learning rate over one phase, as a pure function of the fraction that is done.

    constant   _______      cosine  ~~\__      linear  \        onecycle  /\__
    (with warm-up: a linear ramp from 0 in front)       \                   \

`part` cuts a window out of a longer curve, so that two phases can share one: the thesis's
"cosine 0.35, total 200 epochs, switch at epoch 105" is cosine part [0, 0.525] then [0.525, 1].
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["constant", "cosine", "linear", "onecycle"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ONECYCLE_START = 1 / 25  # of the peak, as in Smith & Topin's 1cycle policy


@dataclass(frozen=True, slots=True)
class Schedule:
    """`lr` is the peak. Cosine, linear and onecycle end at `final`."""

    kind: Kind
    lr: float
    final: float = 0.0
    warmup: float = 0.0
    """The rate rises from 0 for this fraction of the phase (constant, cosine, linear)."""
    ramp: float = 0.3
    """A onecycle rises for this fraction of the phase."""
    part: tuple[float, float] = (0.0, 1.0)
    """The window of the curve that this phase walks through."""

    def at(self, fraction: float) -> float:
        """Return the learning rate when `fraction` (0 to 1) of the phase is done."""
        where = self._where(fraction)
        if self.kind == "onecycle":
            if where < self.ramp:
                low, high, x = self.lr * ONECYCLE_START, self.lr, where / self.ramp
            else:
                low, high, x = self.lr, self.final, (where - self.ramp) / (1 - self.ramp)
            return high + (low - high) * 0.5 * (1 + math.cos(math.pi * x))
        if where < self.warmup:
            return self.lr * where / self.warmup
        where = (where - self.warmup) / (1 - self.warmup)
        if self.kind == "cosine":
            return self.final + (self.lr - self.final) * 0.5 * (1 + math.cos(math.pi * where))
        if self.kind == "linear":
            return self.lr + (self.final - self.lr) * where
        return self.lr

    def at_step(self, step: int, steps: int) -> float:
        """Return the learning rate of step 0, ..., steps - 1. It is the curve's value in the middle
        of the step, so that neither the first step of a warm-up nor the last of a decay has rate
        0."""
        return self.at((step + 0.5) / steps)

    def is_constant_at(self, fraction: float) -> bool:
        """Whether the rate is constant here, so that a plateau is due to the model."""
        return self.kind == "constant" and self._where(fraction) >= self.warmup

    def _where(self, fraction: float) -> float:
        """Return the place on the whole curve, of which the phase uses a part."""
        begin, end = self.part
        return begin + (end - begin) * min(max(fraction, 0.0), 1.0)
