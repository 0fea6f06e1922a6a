"""Dealing jobs to nodes: each job once, and never late by more than the known bound."""

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from support.products import examples

from trainers.fleet.deciding.events import FleetError
from trainers.fleet.ray_cluster.ray_fleet import deal

WORK = some.dictionaries(
    some.text("abcdef", min_size=1, max_size=3), some.floats(0, 100), max_size=6
)
SPEEDS = some.dictionaries(
    some.sampled_from(["n", "m", "k"]), some.floats(0.5, 8), min_size=1, max_size=3
)


def ends(
    dealt: Mapping[str, tuple[str, ...]], work: Mapping[str, float], speeds: Mapping[str, float]
) -> float:
    return max(sum(work[job] for job in jobs) / speeds[node] for node, jobs in dealt.items())


@settings(max_examples=examples(80), deadline=None)
@given(WORK, SPEEDS)
def test_every_job_is_dealt_once_and_the_end_is_within_twice_the_best(
    work: dict[str, float], speeds: dict[str, float]
) -> None:
    dealt = deal(work, speeds)
    assert sorted(job for jobs in dealt.values() for job in jobs) == sorted(work)
    assert dealt.keys() == speeds.keys()
    best = min(
        ends(
            {n: tuple(j for j, at in zip(work, places, strict=True) if at == n) for n in speeds},
            work,
            speeds,
        )
        for places in itertools.product(speeds, repeat=len(work))
    )
    assert ends(dealt, work, speeds) <= 2 * best + 1e-9


@settings(max_examples=examples(80), deadline=None)
@given(WORK, SPEEDS)
def test_each_node_has_its_longest_job_first(
    work: dict[str, float], speeds: dict[str, float]
) -> None:
    for jobs in deal(work, speeds).values():
        amounts = [work[job] for job in jobs]
        assert amounts == sorted(amounts, reverse=True)


def test_equal_jobs_and_nodes_are_dealt_in_their_order_and_loads_count() -> None:
    work = dict.fromkeys("abcd", 1.0)
    assert deal(work, {"n": 1.0, "m": 1.0}) == {"n": ("a", "c"), "m": ("b", "d")}
    assert deal(work, {"n": 3.0, "m": 1.0}) == {"n": ("a", "b", "c"), "m": ("d",)}
    assert deal(work, {"n": 1.0, "m": 1.0}, {"n": 4.0}) == {"n": (), "m": ("a", "b", "c", "d")}
    assert deal({}, {"n": 1.0}) == {"n": ()}


@pytest.mark.parametrize(
    ("work", "speeds", "says"),
    [
        ({"a": 1.0}, {}, "no node for 1 job"),
        ({"a": -1.0}, {"n": 1.0}, "job a was given work=-1.0"),
        ({"a": math.nan}, {"n": 1.0}, "job a was given work=nan"),
        ({"a": math.inf}, {"n": 1.0}, "job a was given work=inf"),
        ({"a": 1.0}, {"n": 0.0}, "node n has the speed 0.0"),
    ],
    ids=str,
)
def test_bad_numbers_are_refused_by_name(
    work: dict[str, float], speeds: dict[str, float], says: str
) -> None:
    with pytest.raises(FleetError, match=says):
        deal(work, speeds)
