"""What a member does next: a function of the headers of all members of its generation."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from trainers.elastic.deciding.decision import (
    Apply,
    Compute,
    LaneRate,
    Reduce,
    Rejoin,
    Stop,
    ToGate,
    Wait,
    best_counts,
    deal,
    decide,
    is_equal_vote,
)
from trainers.elastic.deciding.header import Header, LaneLogs, MemberPace
from trainers.elastic.work.plain_work import seed_after, seed_of_lane

LANES = range(6)


def all_decide(*headers: Header, least: int = 1) -> list[Any]:
    return [decide(headers, rank, LANES, least) for rank in range(len(headers))]


def head(name: str, **said: Any) -> Header:
    return Header(name, said.pop("step", 5), **said)


def test_missing_lanes_are_dealt_once_and_by_speed() -> None:
    found = all_decide(head("a", pace=MemberPace(1.0)), head("b", pace=MemberPace(2.0)))
    assert found == [Compute((0, 1)), Compute((2, 3, 4, 5))]


def test_lanes_stay_with_who_had_them_whoever_asks_and_are_nobodys_when_two_claim_them() -> None:
    a, b = head("a", had=(1, 3, 5)), head("b", had=(0, 2, 4, 5))
    assert all_decide(a, b) == [Compute((1, 3, 5)), Compute((0, 2, 4))]


def test_lanes_of_a_dead_member_are_dealt_again_and_those_that_are_done_are_not() -> None:
    a, b = head("a", done=(0, 1), had=(0, 1)), head("b", done=(2, 3), had=(2, 3))
    assert all_decide(a, b) == [Compute((4,)), Compute((5,))]


def test_all_lanes_done_are_reduced_by_their_contributors_in_the_order_of_ranks() -> None:
    found = all_decide(head("a", done=(5, 0, 1)), head("b"), head("c", done=(2, 3, 4)))
    assert found == [Reduce((0, 2))] * 3


def test_a_lane_in_two_sums_stops_all() -> None:
    [first, second] = all_decide(head("a", done=(0, 1)), head("b", done=(1, 2)))
    assert first == second and isinstance(first, Stop) and "lanes [1]" in first.why


def test_one_total_at_all_is_applied_and_none_while_one_member_lacks_it() -> None:
    held = [head(name, held="g", done=(n,)) for n, name in enumerate("abc")]
    assert all_decide(*held) == [Apply()] * 3
    for other in ("", "h"):
        found = all_decide(*held[:2], replace(held[2], held=other))
        assert all(isinstance(one, Compute) for one in found)


def test_who_is_behind_applies_what_the_others_have_applied() -> None:
    found = all_decide(head("a", step=6, kept="g"), head("b", held="g"), head("c", held="g"))
    assert found == [Wait(), Apply(), Apply()]


def test_who_is_behind_without_the_total_takes_the_state_anew() -> None:
    for held in ("", "other"):
        _, found = all_decide(head("a", step=6, kept="g"), head("b", held=held))
        assert isinstance(found, Rejoin) and "step 5 was committed" in found.why


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([head("a", step=7), head("b")], "2 steps apart"),
        ([head("a", step=6, kept="g"), head("b", step=6, kept="h"), head("c")], "two totals"),
        ([head("a", weights="x"), head("b", weights="y")], "no majority"),
        ([head("a"), head("b", trouble="lane 3 is NaN")], "b: lane 3 is NaN"),
    ],
)
def test_what_no_rule_can_mend_stops_all_members_alike(headers: list[Header], why: str) -> None:
    found = all_decide(*headers)
    assert all(isinstance(one, Stop) and why in one.why for one in found)


def test_the_member_with_other_weights_than_the_most_takes_the_state_anew() -> None:
    a, b, c = (head(name, weights=w) for name, w in zip("abc", "xyx", strict=True))
    first, second, third = all_decide(a, b, c)
    assert first == third == Wait()
    assert isinstance(second, Rejoin) and "2 other members" in second.why


def test_an_announced_change_waits_until_all_know_of_it_and_nothing_is_begun() -> None:
    a, b = head("a", announced=True), head("b", announced=True)
    assert all_decide(a, b) == [ToGate()] * 2
    assert ToGate() not in all_decide(a, replace(b, announced=False))
    assert ToGate() not in all_decide(a, replace(b, done=(1,)))


def test_too_few_members_settle_a_total_and_then_go_to_the_gate() -> None:
    a, b = head("a", held="g", done=(0,)), head("b", held="g")
    assert all_decide(a, b, least=3) == [Apply()] * 2
    assert all_decide(replace(a, held=""), b, least=3) == [ToGate()] * 2
    assert all_decide(replace(a, step=6, kept="g", held=""), b, least=3) == [Wait(), Apply()]


def test_a_vote_is_equal_where_all_hold_the_same() -> None:
    assert is_equal_vote(["g", "g"]) and not is_equal_vote(["g", "h"])
    assert not is_equal_vote(["a", "a", "b"]), "no majority wins it"


def test_a_header_comes_back_from_its_bytes() -> None:
    told = head("a", done=(3, 1), had=(1, 2), held="g", pace=MemberPace(1.5, 2), announced=True)
    assert Header.decode(told.encode()) == told
    assert Header.decode(replace(told, logs=LaneLogs(samples=4)).encode()).logs.samples == 4


# ---- deal ---------------------------------------------------------------------------------------


def test_counts_are_the_best_of_all_divisions() -> None:
    speeds = {"a": 1.0, "b": 2.0, "c": 3.5}
    found = best_counts(7, speeds)
    best = min(
        max(n / speed for n, speed in zip(counts, speeds.values(), strict=True))
        for counts in itertools.product(range(8), repeat=3)
        if sum(counts) == 7
    )
    assert max(found[name] / speeds[name] for name in speeds) == best


def test_a_newcomer_gets_its_share_and_nobody_elses_lane_moves_but_those() -> None:
    before = deal(range(12), {"a": 1.0, "b": 1.0}, {})
    after = deal(range(12), {"a": 1.0, "b": 1.0, "c": 0.0}, before)
    assert [*after.values()].count("c") == 4
    assert all(after[lane] in (before[lane], "c") for lane in before)


def test_a_deal_that_is_hardly_better_moves_nothing() -> None:
    before = deal(range(32), {"a": 1.0, "b": 1.0}, {})
    assert deal(range(32), {"a": 1.0, "b": 1.05}, before) == before
    assert deal(range(32), {"a": 1.0, "b": 1.5}, before) != before


def test_a_member_without_lanes_is_believed_to_be_faster_until_it_gets_one() -> None:
    speeds = {"a": 1.0, "b": 1.0, "c": 0.01}
    before = deal(range(8), speeds, {})
    assert "c" not in before.values()
    lanes = [[*deal(range(8), speeds, before, {"c": idle}).values()] for idle in range(1000)]
    shares = [found.count("c") for found in lanes]
    assert shares == sorted(shares) and shares[-1] == 2
    assert shares.count(0) > 100, "a member that is slow for good is asked seldom"


def test_members_that_are_too_many_for_the_lanes_do_not_take_them_from_each_other() -> None:
    speeds = {"a": 1.0, "b": 1.0, "c": 1.0}
    before = deal(range(2), speeds, {})
    assert [*before.values()] == ["a", "b"]
    assert deal(range(2), speeds, before, {"c": 10_000}) == before


def test_a_rate_is_told_after_the_first_step_and_anew_after_steps_without_lanes() -> None:
    rate = LaneRate()
    told = [rate.rate]
    for lanes, seconds in ((4, 40.0), (4, 1.0), (4, 2.0)):
        rate.add_step(lanes, seconds)
        rate.end_step(computed=True)
        told.append(rate.rate)
    assert told == [0.0, 0.0, 4.0, pytest.approx(0.7 * 4 + 0.3 * 2)]
    for _ in range(3):
        rate.end_step(computed=False)
    assert rate.idle == 3 and rate.rate == told[-1]
    rate.add_step(1, 0.125)
    rate.end_step(computed=True)
    assert rate.rate == 8.0 and rate.idle == 0


def test_nobody_to_deal_to_is_an_error() -> None:
    with pytest.raises(ValueError, match="no member"):
        deal([1], {}, {})


# ---- seeds --------------------------------------------------------------------------------------


def test_every_lane_of_every_step_has_a_seed_of_its_own_and_always_the_same() -> None:
    places = [(seed, step, lane) for seed in (0, 1) for step in range(30) for lane in range(30)]
    seeds = [seed_of_lane(*place) for place in places]
    assert len({*seeds}) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seed_of_lane(3, 5, 7) == 4070203524  # A log of an older version replays, too.
    afters = {seed_after(seed, step) for seed, step, lane in places if lane == 0}
    assert len(afters) == 60 and not afters & {*seeds}
