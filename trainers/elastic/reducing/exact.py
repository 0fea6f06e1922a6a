"""Sums that do not depend on who computed what: fixed-point numbers in int64.

Floating-point addition depends on its order; the addition of integers does not. So each lane's
float gradient becomes integers, once, and from then on any dealing of lanes and any order gives the
same bits.

    the rule            one step is 2**-k, with k = 48 - ceil(log2(lanes)): a function of V alone
    range of a lane     |x| <= 2**14 (16,384) for each number of a gradient
    headroom            V lanes at the limit add up to 2**62 at most, so int64 never wraps
    resolution          64 lanes: k = 42, a step of 2.3e-13; a lane is rounded to half a step
    what is lost        a number below half a step is 0; one of 1e-6 keeps about 22 bits
    what it costs       8 bytes a number for the sums and on the wire of the all-to-all and of the
                        gather, instead of 4; each number of a lane takes some ten times the CPU
                        time of adding floats

A number that is NaN, infinite or too large raises an error that names it. Nothing wraps in silence.
"""

from dataclasses import dataclass

import torch

from trainers.elastic.reducing.reducing_errors import FixedPointError

LIMIT_BITS = 14
TOTAL_BITS = 62
BLOCK = 1 << 18
"""Numbers that are converted at a time: their float64 copies stay in the cache."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """How numbers of a run with so many lanes are written as integers."""

    lanes: int

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= 1 << 24:
            raise FixedPointError(f"{self.lanes} lanes: exact sums take 1 to {1 << 24} lanes")

    @property
    def fraction_bits(self) -> int:
        return TOTAL_BITS - LIMIT_BITS - (self.lanes - 1).bit_length()

    def add(self, sums: torch.Tensor, gradient: torch.Tensor, what: str) -> None:
        """Add one lane's flat gradient to flat int64 sums. `what` names the lane in an error.

        All numbers are looked at before the first is added: after an error the sums are as before.
        """
        if sums.dtype != torch.int64 or sums.shape != gradient.shape or sums.dim() != 1:
            raise FixedPointError(
                f"{what}: the sums are {tuple(sums.shape)} of {sums.dtype}, the gradient is"
                f" {tuple(gradient.shape)}: both must be flat and alike, and the sums int64"
            )
        limit = 2.0**LIMIT_BITS
        for start in range(0, gradient.numel(), BLOCK):
            block = gradient[start : start + BLOCK]
            if not bool((block.abs() <= limit).all()):
                at = int((~(block.abs() <= limit)).nonzero()[0])
                raise FixedPointError(
                    f"{what}: number {start + at} of {gradient.numel()} is {float(block[at])};"
                    f" exact sums take finite numbers up to {limit:g}. Scale the loss down, or use"
                    ' sum="fast"'
                )
        scale = 2.0**self.fraction_bits
        for start in range(0, gradient.numel(), BLOCK):
            block = gradient[start : start + BLOCK].double().mul_(scale).round_()
            sums[start : start + BLOCK].add_(block.long())

    def floats(self, sums: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers that flat int64 sums of all lanes stand for into a float32 tensor."""
        most = self.lanes << (LIMIT_BITS + self.fraction_bits)
        scale = 2.0**-self.fraction_bits
        for start in range(0, sums.numel(), BLOCK):
            block = sums[start : start + BLOCK]
            if int(block.max()) > most or int(block.min()) < -most:
                raise FixedPointError(
                    f"a sum of {self.lanes} lanes is out of the range that so many lanes can reach:"
                    " a lane was added more than once, or the sums are damaged"
                )
            out[start : start + BLOCK].copy_(block.double().mul_(scale))
