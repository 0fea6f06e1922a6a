"""A pass whose number of samples is not known before it ends: the order of a stream.

    samples known to exist   0 ---------------------------- n
    batches                  0 ------------ b: the order of every pass that has at least n samples

The number of samples changes the order of a pass only near its end. So a batch is that of an
endless pass, as long as enough samples are known to exist (`foreseen`). Law
(tests/property/test_open_end.py): whoever asks first, the batches are those of a pass whose number
of samples was known from the beginning.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from loaders.order.reuse import ReuseBuffer
from loaders.order.serve import Residents, Serve

ENDLESS = 1 << 40
"""More samples than any pass has."""


class Extent(Protocol):
    """How many samples a stream has."""

    def reaches(self, samples: int) -> bool:
        """Whether it has at least so many samples. It may have to be read up to there."""
        ...

    @property
    def samples(self) -> int | None:
        """How many it has. None: that is not known. It is, once `reaches` has said no."""
        ...


def walk_stream(
    plan: ReuseBuffer, batch: int, extent: Extent
) -> tuple[Residents, Iterator[tuple[Serve, bool]]]:
    """Who stands in the buffer before a batch, and the serves from there on, each with whether it
    is the last one. The number of samples of `plan` is not looked at."""
    plan = replace(plan, samples=ENDLESS)
    foreseen = Foresight(plan)
    residents, serves = plan.walk(batch)
    # Without an end, the buffer may hold samples that this batch does not need.
    if not extent.reaches(max(foreseen.samples(batch), residents.entered)):
        residents, serves = _finite_plan(plan, extent).walk(batch)
        return residents, with_last(serves)
    return residents, with_last(_serves(plan, batch, serves, foreseen, extent))


def _serves(
    plan: ReuseBuffer, batch: int, serves: Iterator[Serve], foreseen: "Foresight", extent: Extent
) -> Iterator[Serve]:
    while extent.reaches(foreseen.samples(batch)):
        yield next(serves)
        batch += 1
    yield from _finite_plan(plan, extent).walk(batch)[1]


def _finite_plan(plan: ReuseBuffer, extent: Extent) -> ReuseBuffer:
    samples = extent.samples
    assert samples is not None, "a stream that does not reach so far has ended"
    return replace(plan, samples=samples)


def with_last(serves: Iterator[Serve]) -> Iterator[tuple[Serve, bool]]:
    """The serves, each with whether it is the last one."""
    held = next(serves, None)
    while held is not None:
        following = next(serves, None)
        yield held, following is None
        held = following


class Foresight:
    """How many samples must be there for a batch to be that of a pass without end."""

    def __init__(self, plan: ReuseBuffer) -> None:
        self._plan = plan
        self._rolling = None
        if plan.mode == "rolling" and plan.buffer_batches > 1:
            self._rolling = plan.rolling.foreseen()

    def samples(self, batch: int) -> int:
        plan = self._plan
        if self._rolling is not None:
            fill, ring = self._rolling
            return fill[batch] if batch < len(fill) else ring.foreseen(batch)
        if plan.mode == "immediate":
            return (batch // plan.reuse + 1) * plan.batch_size
        blocks = batch // (plan.buffer_batches * plan.reuse) + 1
        # A block gives a batch to the next one, if that would be smaller than a batch.
        return blocks * plan.capacity + (plan.batch_size if plan.buffer_batches > 1 else 0)
