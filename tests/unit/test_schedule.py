"""Learning-rate curves: where they begin, where they end, and that two windows join."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from perfect.method.schedule import KINDS, Schedule

law = settings(max_examples=examples(100), deadline=None)
FRACTIONS = [n / 100 for n in range(101)]


def curve(schedule: Schedule) -> list[float]:
    return [schedule.at(fraction) for fraction in FRACTIONS]


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        (Schedule("constant", 0.3), 0.3, 0.3),
        (Schedule("constant", 0.3, warmup=0.1), 0.0, 0.3),
        (Schedule("cosine", 0.3), 0.3, 0.0),
        (Schedule("cosine", 0.3, final=0.01), 0.3, 0.01),
        (Schedule("cosine", 0.3, final=0.01, warmup=0.2), 0.0, 0.01),
        (Schedule("linear", 0.3), 0.3, 0.0),
        (Schedule("linear", 0.3, final=0.03), 0.3, 0.03),
        (Schedule("linear", 0.3, warmup=0.5), 0.0, 0.0),
        (Schedule("onecycle", 0.3), 0.3 / 25, 0.0),
        (Schedule("onecycle", 0.3, final=0.001), 0.3 / 25, 0.001),
    ],
    ids=str,
)
def test_a_curve_begins_and_ends_where_it_says(
    schedule: Schedule, first: float, last: float
) -> None:
    assert schedule.at(0) == pytest.approx(first)
    assert schedule.at(1) == pytest.approx(last)


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
def test_a_warm_up_climbs_in_a_straight_line_to_the_peak_and_nothing_exceeds_it(kind: str) -> None:
    schedule = Schedule(kind, 0.4, warmup=0.25)
    assert schedule.at(0.05) == pytest.approx(0.08)
    assert schedule.at(0.125) == pytest.approx(0.2)
    assert schedule.at(0.25) == pytest.approx(0.4)
    assert max(curve(schedule)) == pytest.approx(0.4)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_decay_only_falls_and_is_half_way_down_at_half_time(kind: str) -> None:
    schedule = Schedule(kind, 0.3, final=0.1)
    values = curve(schedule)
    assert values == sorted(values, reverse=True)
    assert schedule.at(0.5) == pytest.approx(0.2)


def test_a_onecycle_rises_to_the_peak_during_the_ramp_and_falls_after_it() -> None:
    schedule = Schedule("onecycle", 0.5, ramp=0.2)
    values = curve(schedule)
    assert values[20] == pytest.approx(0.5)
    assert values[:21] == sorted(values[:21])
    assert values[20:] == sorted(values[20:], reverse=True)
    assert schedule.at(0.1) == pytest.approx((0.5 + 0.02) / 2)
    assert schedule.at(0.6) == pytest.approx(0.25)


def test_the_thesiss_cosine_has_come_down_to_0_1613_at_epoch_105_of_200() -> None:
    whole = Schedule("cosine", 0.35)
    assert whole.at(105 / 200) == pytest.approx(0.1613, abs=5e-5)
    window = Schedule("cosine", 0.35, part=(0.0, 0.525))
    assert window.at(1) == pytest.approx(0.1613, abs=5e-5)


@law
@given(
    kind=st.sampled_from(KINDS),
    cut=st.floats(0.01, 0.99),
    warmup=st.sampled_from([0.0, 0.1, 0.6]),
    where=st.floats(0, 1),
)
def test_two_windows_of_a_curve_join_into_the_curve(
    kind: str, cut: float, warmup: float, where: float
) -> None:
    shape = {"kind": kind, "lr": 0.3, "final": 0.02, "warmup": warmup, "ramp": 0.3}
    whole = Schedule(**shape)
    before, after = Schedule(**shape, part=(0.0, cut)), Schedule(**shape, part=(cut, 1.0))
    assert before.at(1) == pytest.approx(after.at(0))
    assert before.at(where) == pytest.approx(whole.at(cut * where))
    assert after.at(where) == pytest.approx(whole.at(cut + (1 - cut) * where))


@law
@given(
    kind=st.sampled_from(KINDS),
    lr=st.floats(1e-6, 10),
    final=st.floats(0, 1),
    warmup=st.floats(0, 0.9),
    fraction=st.floats(-1, 2),
)
def test_a_rate_is_never_negative_nor_above_the_peak_wherever_one_asks(
    kind: str, lr: float, final: float, warmup: float, fraction: float
) -> None:
    schedule = Schedule(kind, lr, final=final * lr, warmup=warmup)
    assert -1e-9 <= schedule.at(fraction) <= lr * (1 + 1e-9)


@law
@given(kind=st.sampled_from(KINDS), steps=st.integers(1, 300))
def test_no_step_is_wasted_on_a_rate_of_zero(kind: str, steps: int) -> None:
    warmup = 0.0 if kind == "onecycle" else 0.2
    schedule = Schedule(kind, 0.3, warmup=warmup)
    rates = [schedule.at_step(step, steps) for step in range(steps)]
    assert all(rate > 0 for rate in rates)
    assert rates[0] == pytest.approx(schedule.at(0.5 / steps))
    assert rates[-1] == pytest.approx(schedule.at(1 - 0.5 / steps))


@law
@given(
    warmup=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
    part=st.sampled_from([(0.0, 1.0), (0.0, 0.5), (0.1, 0.6), (0.5, 1.0)]),
    fraction=st.floats(0, 1),
)
def test_what_is_called_constant_does_not_change_any_more(
    warmup: float, part: tuple[float, float], fraction: float
) -> None:
    schedule = Schedule("constant", 0.3, warmup=warmup, part=part)
    rest = {schedule.at(fraction + (1 - fraction) * n / 50) for n in range(51)}
    if schedule.is_constant_at(fraction):
        assert len(rest) == 1
    elif part == (0.0, 1.0):
        assert len(rest) > 1
