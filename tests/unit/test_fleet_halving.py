"""Who goes on at a rung, with the numbers written down by hand."""

import math

import pytest

from trainers.fleet.deciding.halving import Halving


def at(rung: int, **values: float) -> dict[str, dict[int, float]]:
    return {job: {rung: value} for job, value in values.items()}


def test_rungs_grow_by_eta() -> None:
    rule = Halving("loss", eta=3, first=500)
    assert [rule.next_look(s) for s in (0, 499, 500, 1499, 1500)] == [500, 500, 1500, 1500, 4500]


def test_the_best_third_goes_on_and_a_part_of_a_job_counts_as_one() -> None:
    rule = Halving("loss", eta=3, first=10)
    stopped = rule.judge(at(10, a=4.0, b=1.0, c=3.0, d=2.0), gone=())
    assert {*stopped} == {"a", "c"}
    assert stopped["c"] == "loss 3 at step 10 is number 3 of 4, and the best 2 go on"
    assert {*rule.judge(at(10, a=2.0, b=1.0, c=3.0), gone=())} == {"a", "c"}


def test_larger_is_better_if_the_mode_says_so() -> None:
    values = at(10, a=4.0, b=1.0, c=3.0)
    assert {*Halving("accuracy", first=10, mode="max").judge(values, ())} == {"b", "c"}


def test_a_job_waits_until_every_living_job_is_there() -> None:
    rule = Halving("loss", first=10)
    seen = {**at(10, a=1.0, b=2.0), "c": {}}
    assert rule.waits("a", seen, ["a", "b", "c"])
    assert rule.judge(seen, ()) == {}
    assert not rule.waits("a", seen, ["a", "b"])
    assert {*rule.judge(seen, {"c"})} == {"b"}


def test_nan_is_worst_and_equal_values_go_by_name() -> None:
    rule = Halving("loss", eta=2, first=10)
    assert {*rule.judge(at(10, a=math.nan, b=math.inf), ())} == {"a"}
    assert {*rule.judge(at(10, b=1.0, a=1.0), ())} == {"b"}
    assert {*rule.judge(at(10, b=math.nan, a=math.nan), ())} == {"b"}
    highest = Halving("loss", eta=2, first=10, mode="max")
    assert {*highest.judge(at(10, a=math.nan, b=-math.inf), ())} == {"a"}


def test_a_late_job_is_judged_against_all_values_of_the_rung() -> None:
    rule = Halving("loss", eta=3, first=10)
    seen = at(10, a=1.0, b=2.0, c=3.0, late=1.5)
    assert "late" not in rule.judge(seen, gone={"b", "c"})  # second of four, and two go on
    assert "late" in rule.judge({**seen, "late": {10: 2.5}}, gone={"b", "c"})


def test_a_lone_job_goes_on() -> None:
    assert Halving("loss", first=10).judge(at(10, a=math.nan), ()) == {}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"metric": ""}, "metric is ''"),
        ({"eta": 1}, "eta is 1"),
        ({"eta": 2.5}, "eta is 2.5"),
        ({"first": 0}, "first is 0"),
        ({"first": True}, "first is True"),
        ({"mode": "least"}, "mode is 'least'"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"Halving: {said}.*give"):
        Halving(**{"metric": "loss", **wrong})  # pyright: ignore[reportArgumentType]
