"""reuse="auto": measured in the first batches, decided, and in force from the next pass on.

Time is what the test says: a clock that every thread has for itself. Reading a sample moves the
reader's, training on a batch moves the consumer's, and nothing else moves any.
"""

import logging
import threading
import types
from typing import Any, cast

import pytest
import torch

from loaders import Cache, ReuseLoader, Workers, passes
from loaders.workers.prefetcher import Prefetcher

BATCH = 4
STEP = 0.040
"""Seconds of a training step: training takes 100 samples a second."""


class Clock:
    def __init__(self) -> None:
        self._own = threading.local()

    def __call__(self) -> float:
        return getattr(self._own, "now", 0.0)

    def wait(self, seconds: float) -> None:
        self._own.now = self() + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(passes, "time", types.SimpleNamespace(perf_counter=clock))
    monkeypatch.setitem(cast(Any, Prefetcher.__init__).__kwdefaults__, "clock", clock)
    return clock


class Slow:
    """Reading a sample takes `seconds`, of the thread that reads."""

    def __init__(self, clock: Clock, seconds: float, size: int = 400) -> None:
        self.clock, self.seconds, self.size = clock, seconds, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.wait(self.seconds)
        return torch.tensor(index)


def auto(source: Slow, **changes: Any) -> ReuseLoader:
    # In threads: a clock ticks in its process alone.
    options = {"reuse": "auto", "workers": Workers(2, "thread"), "buffer_batches": 3, **changes}
    return ReuseLoader(source, BATCH, **options)


def train(loader: ReuseLoader, clock: Clock, batches: int | None = None) -> int:
    """One pass, or its first batches: how many batches it had."""
    done = 0
    for _ in loader:
        clock.wait(STEP)
        done += 1
        if done == batches:
            break
    return done


@pytest.mark.parametrize(
    ("samples_per_second", "reuse"),
    [(400, 1), (115, 1), (105, 2), (57, 2), (53, 3), (30, 4), (12, 8), (2, 8)],
)
def test_the_smallest_reuse_that_keeps_up_is_served_from_the_next_pass_on(
    samples_per_second: float, reuse: int, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loaders")
    with auto(Slow(clock, 2 / samples_per_second)) as loader:
        assert loader.reuse == 1
        assert train(loader, clock) == 100, "the pass that measures serves everything once"
        assert loader.reuse == reuse
        assert len(loader) == 100 * reuse
        assert train(loader, clock) == 100 * reuse
        assert loader.reuse == reuse, "and it stays, as nothing has changed"
    told = [r.getMessage() for r in caplog.records if "reuse" in r.getMessage()]
    assert any("decoding gives" in line and "training takes 100/s" in line for line in told)


def test_most_reuse_bounds_it_and_the_reason_says_what_is_left(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loaders")
    with auto(Slow(clock, 2 / 20), most_reuse=3) as loader:
        train(loader, clock)
        assert loader.reuse == 3
    assert "even reuse 3, the most allowed, leaves it waiting 40% of the time" in caplog.text


def test_a_pass_too_short_to_measure_leaves_it_to_the_next(clock: Clock) -> None:
    with auto(Slow(clock, 2 / 30, size=160)) as loader:
        assert [train(loader, clock), loader.reuse] == [40, 1]
        assert [train(loader, clock), loader.reuse] == [40, 4]


def test_it_is_looked_at_again_when_reading_becomes_slower_or_faster(clock: Clock) -> None:
    source = Slow(clock, 2 / 400)
    with auto(source) as loader:
        train(loader, clock)
        assert loader.reuse == 1
        source.seconds = 2 / 30
        for _ in range(3):
            train(loader, clock)
        assert loader.reuse == 4
        source.seconds = 2 / 400
        for _ in range(3):
            train(loader, clock)
        assert loader.reuse == 1


@pytest.mark.parametrize("batches", [30, 70, 99])
def test_a_resume_goes_on_measuring_and_keeps_what_was_decided(batches: int, clock: Clock) -> None:
    with auto(Slow(clock, 2 / 30)) as interrupted:
        train(interrupted, clock, batches)
        state = interrupted.state_dict()
    with auto(Slow(clock, 2 / 30)) as resumed:
        resumed.load_state_dict(state)
        assert train(resumed, clock) == 100 - batches
        assert resumed.reuse == 4
        after = resumed.state_dict()
    with auto(Slow(clock, 2 / 30)) as later:
        later.load_state_dict(after)
        assert later.reuse == 4
        assert len(later) == 400
        assert train(later, clock, 250) == 250
        within = later.state_dict()
    with auto(Slow(clock, 2 / 30)) as last:
        last.load_state_dict(within)
        assert train(last, clock) == 150


def test_a_copy_to_a_device_that_is_one_batch_ahead_measures_the_same(clock: Clock) -> None:
    with auto(Slow(clock, 2 / 30), device="cpu") as loader:
        train(loader, clock)
        assert loader.reuse == 4


def test_what_the_cache_gives_makes_reuse_needless_again(clock: Clock) -> None:
    with auto(Slow(clock, 2 / 30), cache=Cache("ram", 10**6)) as loader:
        train(loader, clock)
        assert loader.reuse == 4
        for _ in range(2):
            train(loader, clock)
        assert loader.reuse == 1
