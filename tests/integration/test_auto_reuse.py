"""reuse="auto": measured in the first batches and recommended; who wants to follows it.

Time is what the test says: a clock that every thread has for itself. Reading a sample moves the
reader's, training on a batch moves the consumer's, and nothing else moves any.
"""

import logging
import threading
import types
from typing import Any

import pytest
import torch

from loaders import Cache, ReuseLoader, Workers
from loaders.passes import pass_run
from loaders.workers import crew, prefetcher

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
    monkeypatch.setattr(pass_run, "time", types.SimpleNamespace(perf_counter=clock))
    for module in (crew, prefetcher):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


class Slow:
    """Reading a sample takes `seconds`, of the thread that reads."""

    def __init__(self, clock: Clock, seconds: float, size: int = 800) -> None:
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
    [(400, 1), (115, 1), (105, 2), (57, 2), (53, 3), (30, 4), (12, 4), (2, 4)],
)
def test_the_smallest_reuse_that_keeps_up_is_recommended_and_one_is_served(
    samples_per_second: float, reuse: int, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loaders")
    with auto(Slow(clock, 2 / samples_per_second)) as loader:
        for _ in range(3):
            assert train(loader, clock) == 200, "a pass serves everything once"
            assert loader.reuse == 1
        assert loader.recommended_reuse == reuse
        loader.set_reuse(loader.recommended_reuse)
        assert train(loader, clock) == 200 * reuse
        assert loader.recommended_reuse == reuse, "and it stays, as nothing has changed"
    [told] = [r for r in caplog.records if "is recommended" in r.getMessage()]
    assert told.levelno == (logging.INFO if reuse == 1 else logging.WARNING)
    said = told.getMessage()
    assert f"reuse {reuse} is recommended, 1 is served: decoding gives" in said
    assert "training takes 100/s" in said
    if samples_per_second == 12:
        assert "even reuse 4, the most allowed, leaves it waiting 52% of the time" in said


def test_a_pass_too_short_to_measure_leaves_it_to_the_next(clock: Clock) -> None:
    with auto(Slow(clock, 2 / 30, size=280)) as loader:
        assert [train(loader, clock), loader.recommended_reuse] == [70, 1]
        assert [train(loader, clock), loader.recommended_reuse] == [70, 4]


def test_it_is_looked_at_again_when_reading_becomes_slower_or_faster(clock: Clock) -> None:
    source = Slow(clock, 2 / 400)
    with auto(source) as loader:
        train(loader, clock)
        assert loader.recommended_reuse == 1
        source.seconds = 2 / 30
        train(loader, clock)
        assert loader.recommended_reuse == 4
        source.seconds = 2 / 400
        train(loader, clock)
        assert loader.recommended_reuse == 1


@pytest.mark.parametrize("batches", [30, 140, 199])
def test_a_resume_goes_on_measuring_and_keeps_what_was_decided(batches: int, clock: Clock) -> None:
    with auto(Slow(clock, 2 / 30)) as interrupted:
        train(interrupted, clock, batches)
        state = interrupted.state_dict()
    with auto(Slow(clock, 2 / 30)) as resumed:
        resumed.load_state_dict(state)
        assert train(resumed, clock) == 200 - batches
        assert resumed.recommended_reuse == 4
        after = resumed.state_dict()
    with auto(Slow(clock, 2 / 30)) as later:
        later.load_state_dict(after)
        assert (later.reuse, later.recommended_reuse) == (1, 4)


def test_what_the_cache_gives_makes_reuse_needless_again(clock: Clock) -> None:
    with auto(Slow(clock, 2 / 30), cache=Cache("ram", 10**6)) as loader:
        train(loader, clock)
        assert loader.recommended_reuse == 4
        train(loader, clock)
        assert loader.recommended_reuse == 1
