"""When a run without a budget stops capturing."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import CaptureError
from trainers.offloading.hardware.meter import TimeSpent
from trainers.offloading.steps import capture_costs
from trainers.offloading.steps.capture_costs import (
    LEAST,
    MOST,
    RECENT,
    CaptureCosts,
    CaptureTally,
    why_too_costly,
)

ALWAYS_NEW = CaptureCosts(24, 34.0, RECENT, 0.02, 1000.0)
"""24 lengths in turns, in the first pass of a run of 1,000 steps."""

costs = st.builds(
    CaptureCosts, st.integers(0, 200), st.floats(0, 1e6), st.integers(0, RECENT),
    st.floats(1e-6, 1e3), st.floats(0, 1e9) | st.just(math.inf),
)  # fmt: skip


def test_a_short_run_whose_batches_always_differ_goes_on_without_plans() -> None:
    why = why_too_costly(ALWAYS_NEW)
    for said in ("24 times", "34.0 s", f"{RECENT} of the last {RECENT}", "20 ms", "1,000", "2.0 s"):
        assert said in why


@pytest.mark.parametrize(
    "other",
    [
        {"captures": LEAST - 1},
        {"left": 1e6},  # they may save 2,000 s
        {"recent": 0},  # all shapes are known by now
        {"recent": 1, "step_seconds": 1.0, "left": 100.0},  # steps are long beside captures
    ],
    ids=str,
)
def test_other_runs_go_on_with_plans(other: dict[str, float]) -> None:
    assert not why_too_costly(replace(ALWAYS_NEW, **other))


@pytest.mark.parametrize("left", [1e6, math.inf])
def test_a_run_without_an_end_stops_too_where_nothing_repeats(left: float) -> None:
    assert not why_too_costly(replace(ALWAYS_NEW, captures=MOST - 1, left=left))
    assert why_too_costly(replace(ALWAYS_NEW, captures=MOST, left=left))


@given(costs)
def test_who_goes_on_eagerly_has_nothing_to_lose_by_it(found: CaptureCosts) -> None:
    if why_too_costly(found):
        assert found.captures >= LEAST and found.recent > 0
        assert found.seconds > found.earned or found.captures >= MOST


@given(costs, st.floats(1, 10), st.integers(0, 5))
def test_more_spent_on_captures_never_speaks_for_plans(
    found: CaptureCosts, factor: float, more: int
) -> None:
    if why_too_costly(found):
        assert why_too_costly(replace(found, seconds=found.seconds * factor))
        assert why_too_costly(replace(found, recent=min(RECENT, found.recent + more)))
        assert why_too_costly(replace(found, step_seconds=found.step_seconds / factor))


def test_the_tally_counts_captures_and_forgets_old_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(0, 10_000, 3))
    monkeypatch.setattr(capture_costs, "monotonic", lambda: next(now))
    tally, spent = CaptureTally(), TimeSpent(runs=100, seconds=1.0)
    for _ in range(LEAST):
        tally.check(spent, 1.0)
        with tally.counted():
            pass
    with pytest.raises(
        CaptureError, match=f"captured {LEAST} times, which took 24.0 s, and {LEAST}"
    ):
        tally.check(spent, 1.0)
    for _ in range(RECENT):
        tally.found()
    tally.check(spent, 1.0)
    with pytest.raises(ZeroDivisionError), tally.counted():
        raise ZeroDivisionError
    tally.check(spent, 1.0)
