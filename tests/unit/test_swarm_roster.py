"""The anchor's roster: who is there, and when the next generation begins."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from trainers.elastic.deciding.electorate import Electorate
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
    return said(roster.enter_gate(name, roster.generation, step, NOW, planned=planned))


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


def test_fewer_than_min_peers_settle_a_step_among_themselves_and_then_wait() -> None:
    roster = a_roster("ab", replace(SETTINGS, min_peers=2))
    lost(roster, "b")
    assert gate(roster, "a") == [(Form, "a")]
    assert gate(roster, "a", planned=True) == []
    assert roster.waits_for() == "peers: 1 of 2 (--min-peers of the anchor)"
    assert said(roster.add_newcomer(member("c"), 0, NOW)) == [(CopyFrom, "c", "a")]
    assert said(roster.mark_ready("c", "a", NOW)) == [(Form, "a", "c")]


def test_a_death_breaks_the_generation_and_newcomers_wait_for_the_one_after() -> None:
    roster = a_roster("abc")
    roster.add_newcomer(member("n"), 0, NOW)
    roster.mark_ready("n", "b", NOW)
    assert lost(roster, "c") == [(Break, "a", "b")]
    assert gate(roster, "a") == []
    assert gate(roster, "b") == [(Form, "a", "b"), (Announce, "a", "b")]
    assert gate(roster, "a", planned=True) == []
    assert gate(roster, "b", planned=True) == [(Form, "a", "b", "n")]


def test_a_generation_tells_the_step_of_who_has_applied_the_most() -> None:
    roster = a_roster("ab")
    gate(roster, "a", 3)
    [form] = roster.enter_gate("b", 1, 4, NOW, planned=False)
    assert isinstance(form, Form) and form.step == 4


def test_who_copied_from_the_dead_copies_again_and_its_old_word_counts_no_more() -> None:
    roster = a_roster("ab")
    assert said(roster.add_newcomer(member("n"), 0, NOW)) == [(CopyFrom, "n", "b")]
    assert lost(roster, "b") == [(Break, "a"), (CopyFrom, "n", "a")]
    assert roster.mark_ready("n", "b", NOW) == []
    assert gate(roster, "a") == [(Form, "a")]
    assert said(roster.mark_ready("n", "a", NOW)) == [(Announce, "a")]


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


def test_silent_members_count_until_a_step_is_made_without_them() -> None:
    roster = a_roster("abcde", replace(SETTINGS, only_anchor=False))
    for name in "de":
        lost(roster, name, certain=False)
    gate(roster, "a")
    gate(roster, "b")
    assert gate(roster, "c") == [(Form, "a", "b", "c")]
    assert lost(roster, "c", certain=False) == [(Expel, "c"), (Break, "a", "b")]
    gate(roster, "a")
    # c may never have heard of the generation {a b c}, and go on with d and e.
    assert gate(roster, "b") == []
    assert roster.electorate.outnumbers("ab") == ["c", "d", "e"]


def test_a_step_settles_a_generation() -> None:
    electorate = Electorate([tuple("abcde")], {"d", "e"})
    electorate.add_view(tuple("abc"))
    electorate.settle(tuple("abc"))
    electorate.silent.add("c")
    assert electorate.outnumbers("ab") == []
    assert electorate.outnumbers("a") == ["c"]


def test_who_was_silent_keeps_no_run_from_beginning_after_a_step_without_it() -> None:
    roster = a_roster("abc", replace(SETTINGS, only_anchor=False))
    lost(roster, "c", certain=False)
    gate(roster, "a")
    assert gate(roster, "b")[-1] == (Form, "a", "b")
    roster.note_beat("a", roster.began_at + 1, NOW)
    for name in "ab":
        lost(roster, name)
    assert said(roster.add_newcomer(member("d"), roster.committed, NOW))[-1] == (FoundRun, "d")


# ---- after another anchor -----------------------------------------------------------------------


def test_a_new_anchor_waits_for_the_members_it_hears_of_and_then_breaks_without_them() -> None:
    roster = Roster(SETTINGS, NOW)
    asked = said(roster.restore_member(member("a"), view(7, "abc"), 5, NOW))
    assert asked == [(AskHost, "b"), (AskHost, "c")]
    assert roster.restore_member(member("b"), view(7, "abc"), 5, NOW) == []
    roster.enter_gate("a", 7, 5, NOW, planned=False)
    assert gate(roster, "b", 5) == []
    assert "c" in roster.waits_for()
    roster.note_beat("a", 5, NOW + 2)
    roster.note_beat("b", 5, NOW + 2)
    assert said(roster.tick(NOW + 2.1))[-1] == (Form, "a", "b")


@pytest.mark.parametrize("only_anchor", [True, False])
def test_a_new_anchor_does_not_wait_for_a_member_whose_host_says_that_it_is_dead(
    only_anchor: bool,
) -> None:
    roster = Roster(replace(SETTINGS, only_anchor=only_anchor), NOW)
    for name in "ab":
        roster.restore_member(member(name), view(7, "abcd"), 5, NOW)
    for dead in "cd":
        assert lost(roster, dead) == [(Break, "a", "b")]
    gate(roster, "a", 5)
    assert gate(roster, "b", 5) == [(Form, "a", "b")]


def test_who_comes_back_after_a_newer_generation_began_is_expelled() -> None:
    roster = a_roster("ab")
    lost(roster, "b")
    gate(roster, "a")
    assert said(roster.restore_member(member("b"), view(1, "ab"), 3, NOW)) == [(Expel, "b")]
    assert said(roster.restore_member(member("x"), view(2, "xy"), 3, NOW)) == [(Expel, "x")]


def test_who_comes_back_into_a_broken_generation_is_called_to_the_gate() -> None:
    roster = a_roster("ab")
    lost(roster, "b")
    assert said(roster.restore_member(member("b"), view(1, "ab"), 3, NOW)) == [(Break, "b")]
    gate(roster, "a")
    assert gate(roster, "b") == [(Form, "a", "b")]


def test_a_member_that_has_not_heard_of_its_generation_is_taken_along() -> None:
    roster = Roster(SETTINGS, NOW)
    roster.restore_member(member("a"), view(8, "ab"), 5, NOW)
    words = roster.restore_member(member("b"), view(7, "abc"), 5, NOW)
    assert [(word.peers, word.generation) for word in words if isinstance(word, Break)] == [
        (("a", "b"), 8),
        (("b",), 7),
    ]
    assert roster.enter_gate("b", 7, 5, NOW, planned=True) == []
    assert gate(roster, "a", 5) == [(Form, "a", "b")]


def test_who_comes_back_after_a_change_was_announced_hears_of_it() -> None:
    roster = Roster(SETTINGS, NOW)
    roster.restore_member(member("a"), view(7, "ab"), 5, NOW)
    roster.add_newcomer(member("n"), 0, NOW)
    assert said(roster.mark_ready("n", "a", NOW)) == [(Announce, "a")]
    assert said(roster.restore_member(member("b"), view(7, "ab"), 5, NOW)) == [(Announce, "b")]


def test_a_newcomer_that_has_not_heard_of_its_generation_is_not_waited_for() -> None:
    for newcomer_first in (False, True):
        roster = Roster(SETTINGS, NOW)
        comes = [
            lambda r=roster: r.restore_member(member("a"), view(8, "an"), 5, NOW),
            lambda r=roster: r.add_newcomer(member("n"), 0, NOW),
        ]
        words = [word for come in comes[:: -1 if newcomer_first else 1] for word in come()]
        assert any(isinstance(word, Break) and word.peers == ("a",) for word in words)
        assert gate(roster, "a", 5) == [(Form, "a")]


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


def test_deaths_and_steps_in_between_make_no_generation_fruitless() -> None:
    roster = a_roster("abc")
    for step in range(4, 12):
        gate(roster, "a", step)
        gate(roster, "b", step)
        assert gate(roster, "c", step) == [(Form, "a", "b", "c")]


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
