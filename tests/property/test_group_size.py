"""Groups take a peer's lanes in their order, and their size is never worse than single lanes."""

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as some
from support.products import examples

from trainers.elastic.work.planned_work import FASTER, SIZES, best_size, next_size, together

SIZE = some.sampled_from([1, 2, 3, 4, 8])
STEP = some.lists(some.sampled_from([0, 2, 3]), min_size=1, max_size=12)
SECONDS = some.lists(some.floats(0.01, 10), min_size=len(SIZES), max_size=len(SIZES))


@settings(max_examples=examples(200), deadline=None)
@given(STEP, SIZE, some.permutations(range(12)), some.integers(1, 12))
def test_groups_are_full_and_take_each_lane_once_in_the_order_of_the_peer(
    sizes: list[int], group: int, order: list[int], count: int
) -> None:
    with_samples = [lane for lane, size in enumerate(sizes) if size]
    lanes = [lane for lane in order if lane in with_samples][:count]
    first = with_samples[0] if with_samples else 0
    left, found = lanes, list[list[int]]()
    while left:
        taken = together(left, sizes, 3, first, group)
        found.append(left[:taken])
        left = left[taken:]
    assert [lane for one in found for lane in one] == lanes
    for one in found:
        assert len(one) in (1, group)
        if len(one) > 1:
            assert first not in one[1:]
            assert {sizes[lane] for lane in one} == {3}
    singles = [one for one in found if len(one) == 1]
    whole = [lane for lane in lanes if sizes[lane] == 3]
    if len(whole) == len(lanes) and first not in lanes[1:]:
        assert group == 1 or len(singles) == len(lanes) % group


def seconds_of_step(seconds: Mapping[int, float], size: int, lanes: int) -> float:
    """Lane after lane, a group as soon as there are enough."""
    total = 0.0
    while lanes:
        now = size if lanes >= size else 1
        total, lanes = total + seconds[now], lanes - now
    return total


@settings(max_examples=examples(200), deadline=None)
@given(SECONDS, some.integers(1, 20))
def test_the_chosen_size_is_worth_it_and_fits_the_deal(took: list[float], lanes: int) -> None:
    real: dict[int, float] = dict(zip(SIZES, took, strict=True))
    known = {1: real[1]}
    while (size := next_size(known, lanes)) is not None:
        assert size not in known and size <= lanes
        known[size] = real[size]
    best = best_size(known, lanes)
    alone = seconds_of_step(known, 1, lanes)
    if best > 1:
        assert seconds_of_step(known, best, lanes) <= FASTER * alone * (1 + 1e-9)
    for size in known:
        # No other one that was tried is better by more than what is not worth it.
        assert seconds_of_step(known, size, lanes) >= FASTER * seconds_of_step(
            known, best, lanes
        ) * (1 - 1e-9)


def test_sizes_are_tried_as_long_as_they_pay() -> None:
    assert next_size({1: 1.0}, 8) == 2
    assert next_size({1: 1.0, 2: 1.2}, 8) == 4
    assert next_size({1: 1.0, 2: 2.0}, 8) is None
    assert next_size({1: 1.0, 2: 1.2}, 3) is None
    assert next_size({1: 1.0}, 1) is None
    assert best_size({1: 1.0, 2: 1.2, 4: 2.0}, 8) == 4
    # Seven lanes are one group of four and three single ones, or three groups of two and one.
    assert best_size({1: 1.0, 2: 1.2, 4: 2.0}, 7) == 2
