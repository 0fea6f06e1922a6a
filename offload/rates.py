"""What a machine was measured to do, and the `Costs` that come of it. Pure.

    calibration.py   --Samples (seconds of every repeat)-->   Rates   --costs("bfloat16")-->   Costs

A rate is that of the median repeat: the best one is luck, and a plan is kept for hours. A copy has
a part that grows with its bytes and one that does not; both are read off a small and a large one.

Host workers share the machine's memory. As many are reckoned with as bring 95 % of what the most
bring together, each with its share of that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from offload.costs import Costs

ENOUGH = 0.95
"""Of the host memory's best rate."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The same thing several times: `amount` bytes or operations in `seconds[k]`."""

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
    """Operations, by type."""
    memory: Sample
    """Bytes that a kernel reads and writes."""
    launch: Sample
    """Kernels that do next to nothing."""
    h2d: tuple[Sample, Sample]
    """A small copy and a large one."""
    d2h: tuple[Sample, Sample]
    both: tuple[Sample, Sample]
    """Large ones to the device and back, while the other direction is busy too."""
    d2d: Sample
    host: Mapping[int, Sample]
    """Bytes that the optimizer's update reads and writes, by how many workers do it at once."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction."""

    rate: float
    """Bytes per second."""
    fixed: float
    """Seconds of a copy of nothing."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one machine. Per second, and bytes where nothing else is said."""

    device: str
    """What was measured, for people."""
    gemm: Mapping[str, float]
    """Operations, by type."""
    memory: float
    launch: float
    """Seconds."""
    h2d: Link
    d2h: Link
    shared: float
    """Of its rate that a direction keeps while the other one copies too."""
    d2d: float
    host: Mapping[int, float]
    """Of so many workers together."""
    notes: tuple[str, ...] = ()

    @property
    def host_workers(self) -> int:
        """The fewest that bring nearly all that can be had."""
        best = max(self.host.values())
        return min(workers for workers, rate in self.host.items() if rate >= ENOUGH * best)

    def costs(self, precision: str = "float32") -> Costs:
        """For programs whose matrix products are of this type. Other rates do not depend on it."""
        if precision not in self.gemm:
            raise ValueError(f"precision={precision!r} was not measured: {', '.join(self.gemm)}")
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
        """For a JSON file."""
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
        # One copy less in the other direction would not make it slower than alone: noise.
        shared=min(1.0, sum(kept) / len(kept)),
        d2d=samples.d2d.rate,
        host={workers: sample.rate for workers, sample in samples.host.items()},
        notes=tuple(notes),
    )


def link(small: Sample, large: Sample) -> Link:
    """The line through both. Where noise has it fall, the large one has no fixed part."""
    more, longer = large.amount - small.amount, large.typical - small.typical
    rate = more / longer if more > 0 and longer > 0 else large.rate
    return Link(rate, max(0.0, small.typical - small.amount / rate))
