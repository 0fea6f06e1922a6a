"""What a member of a swarm does next, when a generation begins, and who is refused as too slow."""

import itertools
from collections.abc import Sequence
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
    Wait,
    best_counts,
    deal,
    decide,
    is_equal_vote,
)
from trainers.elastic.deciding.header import Header, LaneLogs, MemberPace
from trainers.elastic.deciding.roster import Roster, Settings
from trainers.elastic.deciding.view import (
    Announce,
    AskHost,
    Break,
    CopyFrom,
    Expel,
    Form,
    FoundRun,
    Member,
    Order,
    Refuse,
    View,
)
from trainers.elastic.peer.donor import Following, seconds_left, why_too_slow
from trainers.elastic.work.plain_work import seed_after, seed_of_lane

LANES = range(6)


def all_decide(*headers: Header, least: int = 1) -> list[Any]:
    return [decide(headers, rank, LANES, least) for rank in range(len(headers))]


def head(name: str, **said: Any) -> Header:
    return Header(name, said.pop("step", 5), **said)


def test_missing_lanes_are_dealt_once_and_by_speed() -> None:
    found = all_decide(head("a", pace=MemberPace(1.0)), head("b", pace=MemberPace(2.0)))
    assert found == [Compute((0, 1)), Compute((2, 3, 4, 5))]


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


NOW = 100.0
SETTINGS = Settings(heartbeat=2.0)


def member(name: str) -> Member:
    return Member(name, "host", 1)


def view(generation: int, names: str) -> View:
    return View(generation, tuple(map(member, names)))


def said(words: Sequence[Order]) -> list[Any]:
    """A word's kind, with what a test looks at."""
    return [
        (Form, *word.view.names)
        if isinstance(word, Form)
        else (type(word), *word.peers)
        if isinstance(word, Announce | Break)
        else (type(word), word.peer, word.donor.name)
        if isinstance(word, CopyFrom)
        else (type(word), word.member.name)
        if isinstance(word, AskHost)
        else (type(word), word.peer)
        for word in words
    ]


def a_roster(names: str, settings: Settings = SETTINGS, step: int = 3) -> Roster:
    """One in which generation 1 of these members trains."""
    roster = Roster(settings, NOW - 50)
    first, *others = names
    assert (FoundRun, first) in said(
        roster.add_newcomer(member(first), 0, NOW)
    ) or settings.min_peers > 1
    for name in others:
        roster.add_newcomer(member(name), 0, NOW)
    for name in others:
        roster.mark_ready(name, first, NOW)
    formed = roster.enter_gate(first, 0, 0, NOW, planned=False)
    assert said(formed) == [(Form, *names)]
    for name in names:
        roster.note_beat(name, step, NOW)
    return roster


def gate(roster: Roster, name: str, step: int = 3, planned: bool = False) -> list[Any]:
    return said(roster.enter_gate(name, roster.present.number, step, NOW, planned=planned))


def lost(roster: Roster, name: str, *, certain: bool = True) -> list[Any]:
    return said(roster.remove_lost(name, NOW, certain=certain, why="test"))


def test_the_first_peer_founds_and_the_others_copy_from_it() -> None:
    roster = Roster(SETTINGS, NOW - 50)
    assert said(roster.add_newcomer(member("a"), 0, NOW)) == [(FoundRun, "a")]
    assert said(roster.add_newcomer(member("b"), 0, NOW)) == [(CopyFrom, "b", "a")]
    assert said(roster.add_newcomer(member("b"), 0, NOW)) == [(Refuse, "b")]


def test_a_new_anchor_lets_no_run_begin_before_members_could_have_come_back() -> None:
    roster = Roster(SETTINGS, NOW)
    assert roster.add_newcomer(member("n"), 0, NOW) == []
    back = said(roster.restore_member(member("a"), view(7, "ab"), 5, NOW))
    assert back == [(AskHost, "b"), (CopyFrom, "n", "a")]
    late = Roster(SETTINGS, NOW)
    late.add_newcomer(member("n"), 0, NOW)
    assert said(late.tick(NOW + 2)) == [(FoundRun, "n")]


def test_a_standby_anchor_lets_no_run_begin_at_all() -> None:
    roster = Roster(replace(SETTINGS, standby=True), NOW)
    roster.add_newcomer(member("n"), 0, NOW)
    roster.note_beat("n", 0, NOW + 9)
    assert roster.tick(NOW + 10) == []


def test_the_newest_checkpoint_begins() -> None:
    roster = Roster(SETTINGS, NOW)
    for name, step in (("a", 0), ("b", 7), ("c", 7)):
        roster.add_newcomer(member(name), step, NOW)
    assert said(roster.tick(NOW + 2))[0] == (FoundRun, "b")


def test_min_peers_wait_for_one_another_before_they_begin() -> None:
    roster = Roster(replace(SETTINGS, min_peers=2), NOW - 50)
    assert roster.add_newcomer(member("a"), 0, NOW) == []
    assert said(roster.add_newcomer(member("b"), 0, NOW)) == [(FoundRun, "a"), (CopyFrom, "b", "a")]
    assert gate(roster, "a", 0) == []
    assert roster.waits_for() == "peers: 1 of 2 (--min-peers of the anchor)"
    assert said(roster.mark_ready("b", "a", NOW)) == [(Form, "a", "b")]


def test_who_is_silent_for_longer_than_the_heartbeat_is_expelled() -> None:
    roster = a_roster("ab")
    roster.note_beat("a", 3, NOW + 2)
    assert said(roster.tick(NOW + 2)) == []
    assert said(roster.tick(NOW + 2.1)) == [(Expel, "b"), (Break, "a")]


def test_with_several_anchors_only_more_than_the_silent_go_on() -> None:
    several = replace(SETTINGS, only_anchor=False)
    for names, silent, go_on in (("abc", "c", True), ("abcd", "cd", False), ("ab", "b", False)):
        roster = a_roster(names, several)
        for name in silent:
            lost(roster, name, certain=False)
        words = [gate(roster, name) for name in names if name not in silent]
        assert ([word[0] for word in words[-1]] == [Form]) is go_on
        if not go_on:
            assert "silent, and as many as are here" in roster.waits_for()
            closed = lost(roster, silent[0])  # Now it is certain that this one is gone.
            assert [word[0] for word in closed] == [Form]


# ---- after another anchor -----------------------------------------------------------------------


def test_who_comes_back_after_a_newer_generation_began_is_expelled() -> None:
    roster = a_roster("ab")
    lost(roster, "b")
    gate(roster, "a")
    assert said(roster.restore_member(member("b"), view(1, "ab"), 3, NOW)) == [(Expel, "b")]
    assert said(roster.restore_member(member("x"), view(2, "xy"), 3, NOW)) == [(Expel, "x")]


def test_a_run_that_began_by_mistake_ends_when_the_members_are_back() -> None:
    roster = a_roster("x", step=0)
    back = roster.restore_member(member("a"), view(7, "a"), 5, NOW)
    assert said(back) == [(Expel, "x")]
    assert roster.committed == 5


# ---- the end ------------------------------------------------------------------------------------


def test_members_cut_off_from_each_other_lose_the_youngest_after_three_generations() -> None:
    roster = a_roster("abc")
    said_in_turn = []
    for _ in range(5):
        gate(roster, "a")
        gate(roster, "b")
        said_in_turn.append(gate(roster, "c"))
    assert said_in_turn[:3] == [[(Form, "a", "b", "c")]] * 3
    assert said_in_turn[3] == [(Expel, "c"), (Form, "a", "b")]


def test_nobody_with_the_state_refuses_those_who_come() -> None:
    roster = a_roster("a")
    lost(roster, "a")
    [refusal] = roster.add_newcomer(member("n"), 0, NOW)
    assert isinstance(refusal, Refuse) and "was at step 3" in refusal.why
    assert said(roster.add_newcomer(member("m"), 2, NOW)) == [(FoundRun, "m")]


def test_after_the_end_others_are_told_of_it_and_nobody_begins_anew() -> None:
    roster = a_roster("ab")
    roster.end_run("a", 4, "g", NOW)
    _, form = roster.enter_gate("b", 1, 3, NOW, planned=False)
    assert isinstance(form, Form) and form.finished == (4, "g")
    roster.end_run("b", 4, "g", NOW)
    [refusal] = roster.add_newcomer(member("n"), 9, NOW)
    assert isinstance(refusal, Refuse) and refusal.why == "the run has ended, at step 4"
    assert not roster.peers


SLOW = Following(
    seconds=10.0, held=4.0, taken=40_000_000, commits=12, commit_bytes=8_000_000, lanes=64,
    lane_rate=32.0,
)  # fmt: skip


def test_a_newcomer_that_holds_nobody_up_may_go_on() -> None:
    assert seconds_left(replace(SLOW, held=0.0)) == 5.0


def test_three_seconds_and_a_fifth_of_the_time_is_all_that_it_may_hold_the_swarm_up() -> None:
    assert seconds_left(replace(SLOW, held=4.9)) > 0 >= seconds_left(replace(SLOW, held=5.0))
    assert seconds_left(replace(SLOW, seconds=20.0, held=6.9)) > 0


def test_while_it_prepares_itself_it_may_hold_the_swarm_up_for_longer() -> None:
    assert seconds_left(replace(SLOW, prepares=True)) == 3.0


def test_the_refusal_names_what_it_takes_what_it_could_compute_and_what_is_needed() -> None:
    said = why_too_slow(SLOW)  # A step is 6 s / 12, and a total takes 2 s.
    assert "has waited 4.0 s for it: it takes 4 MB/s" in said
    assert "the total of a step in 2 s, and the swarm makes a step in 0.5 s" in said
    assert "time for 0 of 64 lanes" in said
    assert "It needs 16 MB/s or more" in said


def test_lanes_are_what_the_rest_of_a_step_is_enough_for() -> None:
    quicker = replace(SLOW, taken=320_000_000)  # A total takes 0.25 s.
    assert "time for 8 of 64 lanes" in why_too_slow(quicker)
    assert "time for 64 of 64 lanes" in why_too_slow(replace(quicker, lane_rate=1e9))


def test_a_newcomer_that_has_taken_nothing_has_numbers_too() -> None:
    assert "it takes 1e-07 MB/s" in why_too_slow(replace(SLOW, taken=0, commits=0))
