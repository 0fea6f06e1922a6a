"""What the table of an estimate says, by hand-made figures."""

import json
from typing import Any

import pytest

from offload.estimating.cheap_budgets import CheapBudget, CheapBudgets
from offload.estimating.estimate import Asked, CardEstimate, Estimate, LoaderSeconds

GIB = 1 << 30


def found(
    whole: float = 10, within: float | None = 10, seconds: float = 0.5, task: str = "head.grad"
) -> CheapBudgets:
    """`whole`, `within`: GiB."""
    everything = CheapBudget(int(whole * GIB), seconds, 1.0)
    cheap = [(1.05, CheapBudget(int(0.5 * whole * GIB), seconds * 1.04, 1.04, GIB, 0.3, 5, 6, 7))]
    fits = None
    if within is not None:
        budget = int(within * GIB)
        fits = everything if within == whole else CheapBudget(budget, seconds * 1.2, 1.2, GIB, 0.3)
    return CheapBudgets(everything, int(0.1 * whole * GIB), task, tuple(cheap), fits)


def card(name: str = "h200", error: float | None = 0.05, **given: Any) -> CardEstimate:
    source = "sheet" if error is None else "measured"
    return CardEstimate(name, source, 24 * GIB, GIB, given.pop("found", found()), error, **given)


def words(estimate: Estimate) -> str:
    return " ".join(estimate.table().split())


@pytest.mark.parametrize("seconds", [1e-6, 0.0042, 0.7, 12, 1e5])
@pytest.mark.parametrize("whole", [3e-6, 1.5, 1023.9, 50_000])
@pytest.mark.parametrize("error", [None, 0.004, 9.9])
def test_no_line_is_wider_than_40_columns(
    seconds: float, whole: float, error: float | None
) -> None:
    names = [
        "h200",
        "8xa100-80",
        "16xa100-80",
        "a file with a very long name, which nobody can read.json",
    ]
    cards = [
        card(name, error, found=found(whole, within, seconds, "a_task" * 20))
        for name in names
        for within in (whole, whole / 2, None)
    ]
    price = {} if error is None else {"h200": 1e4}
    asked = Asked(10**9, 1e-3, price)
    estimate = Estimate("M" * 70 + " of many words" * 9, cards, asked, LoaderSeconds(3e4, 9))
    lines = estimate.table().splitlines()
    assert len(cards) == 12 and max(map(len, lines)) <= 40
    assert str(estimate) == estimate.table()


@pytest.mark.parametrize(
    "steps, shown",
    [(1, "0.00"), (7200, "10.00"), (10**8, "138889"), (10**9, "1.4e+06"), (10**17, "1.4e+14")],
)
def test_a_price_loses_no_digit_at_the_edge(steps: int, shown: str) -> None:
    estimate = Estimate("M", [card()], Asked(steps, None, {"h200": 10.0}))
    assert estimate.table().splitlines()[3].split()[-1] == shown
    assert words(estimate).endswith(f"${shown}")


def test_a_measured_card_has_an_error_bar_and_a_price_and_a_sheet_has_neither() -> None:
    asked = Asked(7200, None, {"h200": 3.0, "l4": 0.1})
    estimate = Estimate("M", [card(), card("l4", None)], asked)
    measured, sheet = estimate.table().splitlines()[3:5]
    assert measured.split() == ["h200", "whole", ".5", "±5%", "3.00"]
    assert sheet.split() == ["l4", "whole", "≥.5"]
    assert "cheapest: h200, 1 h, $3.00" in words(estimate)
    only_sheet = Estimate("M", [card("l4", None)], Asked(7200, None, {"l4": 0.1}))
    assert "cheapest" not in words(only_sheet) and "$0" not in words(only_sheet)


def test_the_cheapest_is_one_that_is_done_in_time() -> None:
    slow, fast = card("slow", found=found(seconds=1.0)), card("fast", found=found(seconds=0.1))
    price = {"slow": 1.0, "fast": 20.0}
    in_time = Estimate("M", [slow, fast], Asked(36_000, 5, price))
    assert "cheapest under 5 h: fast, 1 h, $20.00" in words(in_time)
    never = Estimate("M", [slow, fast], Asked(36_000, 0.5, price))
    assert "no card with a price is done under 0.5 h: the fastest takes 1 h" in words(never)
    assert "cheapest: slow" in words(Estimate("M", [slow, fast], Asked(36_000, None, price)))


def test_it_says_what_makes_room_and_what_does_not_fit() -> None:
    small, none = card("small", found=found(within=5)), card("none", found=found(within=None))
    said = words(Estimate("M", [small, none]))
    assert "small 6.0 GiB .6 ±5%" in said
    assert "small: 30% of activations again, 1.20x small: 1.05x in 6.0 GiB" in said
    assert "none no -" in said and "none: no: head.grad needs 2.0 GiB" in said


def test_work_without_a_rate_makes_it_a_lower_bound() -> None:
    of_file = CardEstimate("h200", "measured", 24 * GIB, GIB, found(), None, ("recurrent",))
    estimate = Estimate("M", [of_file], Asked(1000, None, {"h200": 3.0}))
    assert "no rate of recurrent, so this is a lower bound" in words(estimate)
    assert "$" not in words(estimate).replace("$/1k", "") and "≥.5" in words(estimate)


def test_a_slow_loader_is_named_with_the_reuse_that_would_hide_it() -> None:
    slow = Estimate("M", [card()], loader=LoaderSeconds(0.6, 2))
    assert "data: 1.2 s a step on this machine" in words(slow)
    assert "the data binds on h200; reuse 3 would hide it" in words(slow)
    exact = Estimate("M", [card()], loader=LoaderSeconds(0.5, 2))
    assert "reuse 2 would hide it" in words(exact)
    for seconds in (0.1, 0.25):
        assert "binds" not in words(Estimate("M", [card()], loader=LoaderSeconds(seconds, 2)))


def test_a_program_reads_the_same_figures() -> None:
    asked = Asked(7200, 3, {"h200": 3.0})
    estimate = Estimate("M", [card(), card("l4", None, found=found(within=None))], asked)
    read = json.loads(json.dumps(estimate.as_dict()))
    assert read == estimate.as_dict()
    first, second = read["cards"]
    assert (first["cost"], first["seconds"], first["whole_bytes"]) == (3.0, 0.5, 11 * GIB)
    assert first["budgets"][0]["slow_down"] == 1.04 and not first["is_lower_bound"]
    assert (second["cost"], second["seconds"], second["fits"]) == (None, None, "no")
    assert second["is_lower_bound"]
