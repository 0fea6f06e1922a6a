"""Compares reuse with a cache and with a converted file for `perfect-train --check`: how much each
would decode, and which of them this machine has room for.

    a run of E epochs (serves / samples), P passes of decodes, a cache with a share f of the set

    decodes, in passes:   plain E    reuse P    cache 1 + (E - 1)(1 - f)    both 1 + (P - 1)(1 - f)
    a converted file      1, when it is made
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.sizes import format_size

IDLE = 0.05
"""A run that waits for less of its time than this is not made faster by fewer decodes."""


@dataclass(frozen=True, slots=True)
class Feeding:
    """What is known of a run before it begins."""

    phases: Sequence[tuple[float, int]]
    """(passes, reuse) of each."""
    samples: int
    sample_bytes: int
    """Of a decoded sample in a cache."""
    cache_bytes: int
    """What the configuration gives a decoded cache."""
    memory: int
    """Bytes that a cache in RAM might take, of this process."""
    disk: int
    """Bytes that are free where the run's folder lies."""
    stalled: float | None = None
    """The share of an earlier run's time that went into waiting, if there was one."""

    @property
    def whole(self) -> int:
        return self.samples * self.sample_bytes

    def share(self, nbytes: float) -> float:
        return min(1.0, nbytes / self.whole) if self.whole else 1.0


def passes_of(phases: Sequence[tuple[float, int]]) -> float:
    return sum(passes for passes, _ in phases)


def epochs_of(phases: Sequence[tuple[float, int]]) -> float:
    return sum(passes * reuse for passes, reuse in phases)


def decodes_with_cache(passes: float, share: float) -> float:
    """Return the decodes of so many passes, in passes, if the first one caches this share."""
    first = min(1.0, passes)
    return first + (passes - first) * (1 - share)


def even_share(phases: Sequence[tuple[float, int]]) -> float:
    """Return the share of the set from which on a cache without reuse decodes less than reuse
    without a cache: 1 - (P - 1) / (E - 1). It is 0 where a run reuses nothing, and 1 where a run
    ends before a cache is read."""
    passes, epochs = passes_of(phases), epochs_of(phases)
    if epochs == passes:
        return 0.0
    return min(1.0, (epochs - passes) / (epochs - 1)) if epochs > 1 else 1.0


def feeding_lines(run: Feeding) -> Iterator[str]:
    """Yield what each way decodes, and then one piece of advice."""

    def count(passes: float) -> str:
        return f"{round(passes * run.samples):,}"

    here = run.share(run.cache_bytes)
    plain, reuse = epochs_of(run.phases), passes_of(run.phases)
    now = decodes_with_cache(reuse, here)
    yield (
        f"decodes: {count(plain)} without reuse or cache, {count(reuse)} with this reuse alone,"
        f" {count(min(1.0, plain))} with a cache or a converted file of all"
        f" {format_size(run.whole)}; this run {count(now)}"
    )
    yield f"advice: {_advice(run, now)}"


def _advice(run: Feeding, now: float) -> str:
    if run.stalled is not None and run.stalled < IDLE:
        return (
            f"nothing to gain: so far the run waited for samples during {run.stalled:.0%} of its"
            " time, so fewer decodes would not make it faster"
        )
    if now <= 1.0:
        return "nothing to gain: every sample is decoded at most once already"
    if run.whole <= run.memory:
        return (
            f"loader.cache: ram with cache_bytes: {run.whole} would decode every sample once, in"
            f" {format_size(run.whole)} of the {format_size(run.memory)} of memory that are free"
        )
    held = run.share(run.memory)
    on_disk = (
        f"; on disk, where {format_size(run.disk)} are free, a cache or a converted file holds all"
        " of it, decodes every sample once and reads it at every pass"
        if run.whole <= run.disk
        else ""
    )
    too_large = f"the decoded samples take {format_size(run.whole)}, free memory holds {held:.0%}"
    even = even_share(run.phases)
    if not even:
        return f"{too_large}: reuse in the first phase decodes less and needs no such room{on_disk}"
    verdict = "decodes less" if held > even else "decodes more"
    return (
        f"{too_large}: a cache in it {verdict} than this reuse, which a cache equals at {even:.0%}"
        f" ({format_size(round(even * run.whole))}); both together decode least{on_disk}"
    )
