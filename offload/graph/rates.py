"""Turns measured samples of a machine into the `Costs` of a plan. Pure.

    calibration.py   --Samples (seconds of every repeat)-->   costs_of(samples, "bfloat16")

A rate is that of the median repeat: the best repeat is luck, and a plan is used for hours. A part
of a copy's seconds grows with its bytes and a part does not; a small and a large copy show both.

Host workers share the machine's memory. The costs use the smallest number of workers that reaches
95 % of the best rate, and each gets an equal share of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from offload.graph.costs import Costs

ENOUGH = 0.95
"""The share of the best host memory rate that is enough."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The same thing measured several times: `amount` bytes or operations in `seconds[k]`."""

    amount: float
    seconds: Sequence[float]

    @property
    def typical(self) -> float:
        return median(self.seconds)

    @property
    def rate(self) -> float:
        return self.amount / self.typical


@dataclass(frozen=True, slots=True)
class Samples:
    """All that a calibration measures."""

    gemm: Mapping[str, Sample]
    """Operations of matrix products, by dtype."""
    memory: Sample
    """Bytes that a kernel reads and writes."""
    launch: Sample
    """Kernels that do almost nothing."""
    h2d: tuple[Sample, Sample]
    """A small copy and a large one."""
    d2h: tuple[Sample, Sample]
    both: tuple[Sample, Sample]
    """Large copies to the device and back, each while the other direction is busy, too."""
    d2d: Sample
    host: Mapping[int, Sample]
    """Bytes that updates read and write, by the number of workers that run them at once."""


def costs_of(samples: Samples, precision: str = "float32") -> Costs:
    """The costs of programs with matrix products of this precision. Other rates do not depend on
    it."""
    if precision not in samples.gemm:
        raise ValueError(
            f"precision={precision!r} was not measured; choose {', '.join(samples.gemm)}"
        )
    (h2d, h2d_fixed), (d2h, d2h_fixed) = fit_copies(*samples.h2d), fit_copies(*samples.d2h)
    shares = [sample.rate / alone for sample, alone in zip(samples.both, (h2d, d2h), strict=True)]
    best = max(sample.rate for sample in samples.host.values())
    workers = min(n for n, sample in samples.host.items() if sample.rate >= ENOUGH * best)
    return Costs(
        flops=samples.gemm[precision].rate,
        memory=samples.memory.rate,
        launch=1 / samples.launch.rate,
        h2d=h2d,
        d2h=d2h,
        # Less traffic in the other direction cannot slow a copy down, so a value above 1 is noise.
        shared=min(1.0, sum(shares) / len(shares)),
        d2d=samples.d2d.rate,
        copy=max(h2d_fixed, d2h_fixed),
        host_memory=samples.host[workers].rate / workers,
        host_workers=workers,
    )


def fit_copies(small: Sample, large: Sample) -> tuple[float, float]:
    """The line through a small and a large copy: bytes per second, and the seconds of a copy
    without bytes. If noise makes the line fall, the fixed part is 0."""
    more, longer = large.amount - small.amount, large.typical - small.typical
    rate = more / longer if more > 0 and longer > 0 else large.rate
    return rate, max(0.0, small.typical - small.amount / rate)
