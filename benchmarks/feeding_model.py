"""Predicts how long a run takes that is fed in one of five ways. Pure.

    samples N, a run of E epochs (serves / N), P passes of fresh decodes, a cache that holds a
    share f of the decoded samples

    way               decodes, in passes              reads of decoded samples
    plain             E                               none
    reuse             P                               none: a sample is served from its slot
    cache             1 + (E - 1)(1 - f)              (E - 1) f
    reuse and cache   1 + (P - 1)(1 - f)              (P - 1) f
    converted file    1, when it is made              E

    seconds = sum over stretches of max(serves * step, work / workers)
    work    = decodes * decode + serves * serve + reads * read

A stretch is a part of a run with one ratio of decodes to serves: a first pass that fills the cache
is one. Within it the slower side decides: training, or the workers. So what makes decoding cheaper
gains nothing where training is slower anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Way = Literal["plain", "reuse", "cache", "reuse and cache", "converted file"]


@dataclass(frozen=True, slots=True)
class FeedingCosts:
    """Seconds a sample: of one worker, but for `step`."""

    decode: float
    """To read and decode it."""
    serve: float
    """To crop a decoded one and put it into a batch."""
    step: float
    """Of training, when it never waits."""
    workers: int = 1
    read: float = 0.0
    """To read a decoded one back: from a file, or from a cache on disk; 0 in RAM."""
    write: float = 0.0
    """To write a decoded one to the converted file, once."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """In passes through the training set."""

    serves: float
    decodes: float
    reads: float = 0.0
    writes: float = 0.0

    def seconds(self, samples: int, costs: FeedingCosts) -> float:
        work = self.decodes * costs.decode + self.serves * costs.serve
        work += self.reads * costs.read + self.writes * costs.write
        return samples * max(self.serves * costs.step, work / costs.workers)


def stretches(way: Way, phases: Sequence[tuple[float, int]], share: float) -> list[Stretch]:
    """Return the stretches of a run that is fed in one way. `phases`: (passes, reuse); `share`: of
    samples that are cached."""
    epochs = sum(passes * reuse for passes, reuse in phases)
    if way == "plain":
        return [Stretch(epochs, epochs)]
    if way == "converted file":
        return [Stretch(0.0, 1.0, writes=1.0), Stretch(epochs, 0.0, reads=epochs)]
    if way == "cache":
        return _cached([(epochs, 1)], share)
    return _cached(phases, share if way == "reuse and cache" else 0.0)


def _cached(phases: Sequence[tuple[float, int]], share: float) -> list[Stretch]:
    """The first pass fills the cache; every later one decodes what the cache does not hold."""
    found: list[Stretch] = []
    cold = 1.0
    for passes, reuse in phases:
        first = min(cold, passes)
        cold -= first
        later = passes - first
        if first:
            found.append(Stretch(first * reuse, first))
        if later:
            found.append(Stretch(later * reuse, later * (1 - share), reads=later * share))
    return found


def seconds(
    way: Way, phases: Sequence[tuple[float, int]], share: float, samples: int, costs: FeedingCosts
) -> float:
    return sum(part.seconds(samples, costs) for part in stretches(way, phases, share))
