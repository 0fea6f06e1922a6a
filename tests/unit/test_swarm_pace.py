"""A newcomer may hold the swarm up for a moment, and is refused where it never keeps pace."""

from dataclasses import replace

from trainers.elastic.peer.donor import Following, seconds_left, too_slow

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
    said = too_slow(SLOW)  # A step is 6 s / 12, and a total takes 2 s.
    assert "has waited 4.0 s for it: it takes 4 MB/s" in said
    assert "the total of a step in 2 s, and the swarm makes a step in 0.5 s" in said
    assert "time for 0 of 64 lanes" in said
    assert "It needs 16 MB/s or more" in said


def test_lanes_are_what_the_rest_of_a_step_is_enough_for() -> None:
    quicker = replace(SLOW, taken=320_000_000)  # A total takes 0.25 s.
    assert "time for 8 of 64 lanes" in too_slow(quicker)
    assert "time for 64 of 64 lanes" in too_slow(replace(quicker, lane_rate=1e9))


def test_a_newcomer_that_has_taken_nothing_has_numbers_too() -> None:
    assert "it takes 1e-07 MB/s" in too_slow(replace(SLOW, taken=0, commits=0))
