"""The measured rates of a machine, and the `Costs` that follow from them. Pure.

    calibration.py   --Samples (seconds of every repeat)-->   Rates   --costs("bfloat16")-->   Costs

A rate is that of the median repeat: the best repeat is luck, and a plan is used for hours. A part
of a copy's seconds grows with its bytes and a part does not; a small and a large copy show both.

Host workers share the machine's memory. The costs use the smallest number of workers that reaches
95 % of the best rate, and each gets an equal share of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link."""

    rate: float
    """Bytes per second."""
    fixed: float
    """Seconds of a copy without bytes."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of one machine: bytes per second unless a field says otherwise."""

    device: str
    """What was measured, for people."""
    gemm: Mapping[str, float]
    """Operations per second of matrix products, by dtype."""
    memory: float
    launch: float
    """Seconds of a kernel that does almost nothing."""
    h2d: Link
    d2h: Link
    shared: float
    """The share of its rate that a direction keeps while the other one copies, too."""
    d2d: float
    host: Mapping[int, float]
    """The rate of so many workers together."""
    notes: tuple[str, ...] = ()

    @property
    def host_workers(self) -> int:
        """The smallest number of workers that reaches nearly the best rate."""
        best = max(self.host.values())
        return min(workers for workers, rate in self.host.items() if rate >= ENOUGH * best)

    def costs(self, precision: str = "float32") -> Costs:
        """Costs for programs with matrix products of this precision. Other rates do not depend on
        it."""
        if precision not in self.gemm:
            raise ValueError(
                f"precision={precision!r} was not measured; choose {', '.join(self.gemm)}"
            )
        workers = self.host_workers
        return Costs(
            flops=self.gemm[precision],
            memory=self.memory,
            launch=self.launch,
            h2d=self.h2d.rate,
            d2h=self.d2h.rate,
            shared=self.shared,
            d2d=self.d2d,
            copy=max(self.h2d.fixed, self.d2h.fixed),
            host_memory=self.host[workers] / workers,
            host_workers=workers,
        )

    def as_dict(self) -> dict[str, Any]:
        """The rates as a dict for a JSON file."""
        return asdict(self)


def rates_of(samples: Samples, device: str = "", notes: Sequence[str] = ()) -> Rates:
    h2d, d2h = link(*samples.h2d), link(*samples.d2h)
    kept = [
        one.amount / one.typical / alone.rate
        for one, alone in zip(samples.both, (h2d, d2h), strict=True)
    ]
    return Rates(
        device=device,
        gemm={name: sample.rate for name, sample in samples.gemm.items()},
        memory=samples.memory.rate,
        launch=samples.launch.typical / samples.launch.amount,
        h2d=h2d,
        d2h=d2h,
        # Less traffic in the other direction cannot slow a copy down, so a value above 1 is noise.
        shared=min(1.0, sum(kept) / len(kept)),
        d2d=samples.d2d.rate,
        host={workers: sample.rate for workers, sample in samples.host.items()},
        notes=tuple(notes),
    )


def link(small: Sample, large: Sample) -> Link:
    """The line through a small and a large copy. If noise makes it fall, the fixed part is 0."""
    more, longer = large.amount - small.amount, large.typical - small.typical
    rate = more / longer if more > 0 and longer > 0 else large.rate
    return Link(rate, max(0.0, small.typical - small.amount / rate))
