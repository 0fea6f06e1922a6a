"""Statistics of paired runs, against closed forms and against the integral of the density."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from accuracy.paired import Sample, paired, parity, t_cdf, t_quantile


def integrated(t: float, freedom: int, slices: int = 20_000) -> float:
    """Student's distribution from its density, by Simpson's rule from 0 to `t`."""
    front = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)

    def density(x: float) -> float:
        return front * (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    step = t / slices
    weights = (1 if i in (0, slices) else 4 if i % 2 else 2 for i in range(slices + 1))
    return 0.5 + step / 3 * sum(w * density(i * step) for i, w in enumerate(weights))


@pytest.mark.parametrize("t", [-40.0, -3.2, -1.0, -0.01, 0.0, 0.3, 1.8, 12.0])
def test_the_distribution_is_the_closed_form_for_one_and_two_degrees_of_freedom(t: float) -> None:
    assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-13)
    assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-13)


@pytest.mark.parametrize("freedom", [1, 2, 3, 11, 30, 150])
@pytest.mark.parametrize("t", [-2.5, -0.2, 0.7, 2.2, 4.0])
def test_the_distribution_is_the_integral_of_its_density(t: float, freedom: int) -> None:
    assert t_cdf(t, freedom) == pytest.approx(integrated(t, freedom), abs=1e-10)


def test_quantiles_are_those_of_the_printed_tables() -> None:
    printed = {(0.975, 1): 12.706, (0.975, 2): 4.303, (0.95, 11): 1.796, (0.975, 11): 2.201}
    for (p, freedom), value in printed.items():
        assert t_quantile(p, freedom) == pytest.approx(value, abs=5e-4)
        assert t_quantile(1 - p, freedom) == pytest.approx(-value, abs=5e-4)


def test_the_interval_of_two_values_is_the_hand_made_one() -> None:
    # Mean 1, sd sqrt(2), standard error 1: one degree of freedom, so 12.706 to each side.
    assert Sample((0.0, 2.0)).interval() == pytest.approx((1 - 12.7062, 1 + 12.7062), abs=1e-3)
    assert Sample((0.0,)).interval() is None
    assert Sample((0.0,)).sd is None


TWELVE = (0.1, -0.3, 0.4, 0.0, 0.2, -0.2, 0.3, -0.4, 0.1, 0.0, -0.1, 0.3)


def test_the_two_one_sided_tests_reject_exactly_where_the_90_percent_interval_is_inside() -> None:
    for moved in (0.0, 0.3, -0.3, 0.33, 0.34, 0.35, 0.36, 0.4, -0.36, -0.4, 0.6):
        sample = Sample(tuple(value + moved for value in TWELVE))
        low, high = sample.interval(0.90) or (math.nan, math.nan)
        assert (sample.tost(0.5) < 0.05) == (low > -0.5 and high < 0.5), moved


def test_p_of_the_two_one_sided_tests_is_the_larger_tail() -> None:
    sample = Sample(TWELVE)
    error = sample.sd / math.sqrt(12) if sample.sd else math.nan
    lower = 1 - integrated((sample.mean + 0.5) / error, 11)
    upper = integrated((sample.mean - 0.5) / error, 11)
    assert sample.tost(0.5) == pytest.approx(max(lower, upper), rel=1e-3)
    assert Sample(tuple(value + 2 for value in TWELVE)).tost(0.5) > 0.99


def test_values_that_do_not_vary_have_no_test() -> None:
    for values in ((0.1,), (0.1, 0.1, 0.1)):
        with pytest.raises(ValueError, match="values that vary"):
            Sample(values).tost(0.5)


def test_parity_is_called_only_with_all_registered_pairs() -> None:
    assert parity(Sample(TWELVE), 0.5, 12).startswith("parity within 0.5 points (TOST p = ")
    for n in (1, 2, 11):
        assert parity(Sample(TWELVE[:n]), 0.5, 12) == f"no verdict: n = {n} of the 12 registered"


def test_parity_is_not_called_where_the_interval_leaves_the_margin() -> None:
    near = Sample(tuple(value + 0.45 for value in TWELVE))
    wide = Sample(tuple(5 * value for value in TWELVE))
    for sample in (near, wide):
        assert parity(sample, 0.5, 12).startswith("parity not shown")


def test_differences_are_of_the_same_seed_and_of_seeds_that_both_have() -> None:
    ours, control = {3: 70.0, 4: 71.5, 6: 1.0}, {4: 71.0, 3: 70.25, 5: 99.0}
    assert paired(ours, control).values == (-0.25, 0.5)
