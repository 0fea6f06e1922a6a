"""How well a swarm is used, beside figures worked out by hand."""

import dataclasses

import pytest

from trainers.elastic.deciding.utilisation import Nodes, least_global_batch, predict, wire_seconds

FOUR = Nodes(peers=4, bits_per_second=1e9, parameters=25_000_000, seconds_per_sample=0.01)


def test_totals_take_two_ways_over_the_wire_but_for_the_own_part() -> None:
    # 2 (n - 1) / n x 4 bytes x 25M = 150 MB = 1.2 Gbit
    assert wire_seconds(FOUR) == pytest.approx(1.2)
    exact = dataclasses.replace(FOUR, exact=True)
    assert wire_seconds(exact) == pytest.approx(1.8)
    assert wire_seconds(dataclasses.replace(FOUR, peers=1)) == 0


def test_utilisation_is_computing_over_the_whole_step() -> None:
    use = predict(FOUR, global_batch=512, lanes=64)
    assert (use.compute, use.wire, use.commit) == pytest.approx((1.28, 1.2, 0.01))
    assert use.utilisation == pytest.approx(1.28 / 2.49)


def test_lanes_that_cannot_be_dealt_evenly_cost_the_time_of_the_busiest_peer() -> None:
    even, odd = (predict(FOUR, 640, lanes) for lanes in (8, 5))
    assert odd.compute == pytest.approx(even.compute * 2 / (5 / 4))


def test_one_peer_alone_waits_for_nobody() -> None:
    assert predict(dataclasses.replace(FOUR, peers=1), 512, 64).utilisation == 1


def test_the_least_global_batch_keeps_what_was_asked_and_less_does_not() -> None:
    least = least_global_batch(FOUR, lanes=64)
    assert least is not None and least % 64 == 0
    assert predict(FOUR, least, 64).utilisation >= 0.9
    assert predict(FOUR, least - 64, 64).utilisation < 0.9


def test_no_batch_is_large_enough_for_lanes_that_are_too_few() -> None:
    assert least_global_batch(FOUR, lanes=5) is None
