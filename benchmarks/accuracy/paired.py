"""What differences of runs that share a seed say: pure, in plain Python.

-margin        0        +margin
   |    [---x---]          |        90 % interval inside: the two one-sided tests (TOST,
   |                       |        Schuirmann 1987) reject "as far apart as the margin" at 5 %
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TERMS = 500
"""Of a continued fraction that is exact to 1e-15 after some 50."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of independent runs, or differences of pairs of them."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """None: one value has none."""
        return statistics.stdev(self.values) if self.n > 1 else None

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Of the mean, by Student's t."""
        if self.sd is None:
            return None
        half = t_quantile((1 + level) / 2, self.n - 1) * self.sd / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    def tost(self, margin: float) -> float:
        """p of "the true mean is `margin` or more away from 0": the larger of the two tests'."""
        if not self.sd:
            raise ValueError(f"TOST needs values that vary, not {self.values}")
        error = self.sd / math.sqrt(self.n)
        return t_cdf((abs(self.mean) - margin) / error, self.n - 1)


def parity(differences: Sample, margin: float, registered: int) -> str:
    """The verdict. With fewer pairs than were registered there is none: whoever looks at p while
    runs come in, and stops at a good one, finds parity too often."""
    if differences.n < registered:
        return f"no verdict: n = {differences.n} of the {registered} registered"
    p = differences.tost(margin)
    found = "parity" if p < 0.05 else "parity not shown"
    return f"{found} within {margin:g} points (TOST p = {p:.2g}, n = {differences.n})"


def paired(ours: dict[int, float], control: dict[int, float]) -> Sample:
    """Differences by seed, of the seeds that both have."""
    return Sample(tuple(ours[seed] - control[seed] for seed in sorted(ours.keys() & control)))


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line that fits best (least squares)."""
    middle, mean = statistics.fmean(at), statistics.fmean(values)
    spread = sum((x - middle) ** 2 for x in at)
    return sum((x - middle) * (y - mean) for x, y in zip(at, values, strict=True)) / spread


def t_cdf(t: float, freedom: int) -> float:
    """Student's distribution: the probability of a value below `t`."""
    tail = 0.5 * _beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return tail if t < 0 else 1 - tail


def t_quantile(p: float, freedom: int) -> float:
    """The value that a `p` of all lie below, by bisection."""
    low, high = -1e3, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = fraction
        for term in (even, odd):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            fraction *= c * d
        if math.isclose(before, fraction, rel_tol=1e-15):
            return front * fraction
    raise ArithmeticError(f"the incomplete beta function did not settle at x={x}, a={a}, b={b}")
