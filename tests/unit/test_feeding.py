"""When reuse pays, against a cache, a converted file and plain decoding: cases worked by hand."""

import pytest

from benchmarks.feeding_model import FeedingCosts, Way, seconds, stretches

RECIPE = [(4, 3), (3, 1)]
"""4 passes served 3 times, then 3 fresh ones: 15 epochs, 7 passes of decodes."""
COSTS = FeedingCosts(decode=8.0, serve=1.0, step=2.0, workers=2, read=0.5, write=3.0)


@pytest.mark.parametrize(
    ("way", "share", "passes"),
    [
        ("plain", 0.0, 15),
        ("reuse", 0.0, 7),
        ("reuse", 0.5, 7),  # it has no cache
        ("cache", 0.0, 15),
        ("cache", 0.5, 1 + 14 * 0.5),
        ("cache", 1.0, 1),
        ("reuse and cache", 0.0, 7),
        ("reuse and cache", 0.5, 1 + 6 * 0.5),
        ("reuse and cache", 1.0, 1),
        ("converted file", 0.0, 1),
    ],
)
def test_decodes_of_every_way_are_those_of_the_formula(
    way: Way, share: float, passes: float
) -> None:
    made = sum(stretch.decodes for stretch in stretches(way, RECIPE, share))
    assert made == pytest.approx(passes)


@pytest.mark.parametrize(
    ("way", "share", "expected"),
    [
        # 15 epochs of max(2, (8 + 1) / 2) seconds.
        ("plain", 0.0, 15 * 4.5),
        # 12 epochs of max(2, (8 / 3 + 1) / 2) and 3 of 4.5: training decides the first, not 11 / 6.
        ("reuse", 0.0, 12 * 2.0 + 3 * 4.5),
        # One cold epoch, then 14 of (8 / 2 + 1 + 0.25) / 2.
        ("cache", 0.5, 4.5 + 14 * 2.625),
        # All is cached: (1 + 0.5) / 2 is less than a step takes.
        ("cache", 1.0, 4.5 + 14 * 2.0),
        # Cold: 3 epochs of max(2, 11 / 6). Then 9 and 3 epochs; half of the decodes are cached:
        # (8 / 6 + 1 + 0.5 / 6) / 2 is less than a step takes, (4 + 1 + 0.25) / 2 is more.
        ("reuse and cache", 0.5, 3 * 2.0 + 9 * 2.0 + 3 * 2.625),
        # It is made first, which nothing hides: (8 + 3) / 2.
        ("converted file", 0.0, 5.5 + 15 * 2.0),
    ],
)
def test_a_stretch_takes_as_long_as_its_slower_side(
    way: Way, share: float, expected: float
) -> None:
    assert seconds(way, RECIPE, share, 10, COSTS) == pytest.approx(10 * expected)


def test_nothing_is_faster_than_plain_decoding_where_training_is_slower_than_decoding() -> None:
    slow = FeedingCosts(decode=8.0, serve=1.0, step=6.0, workers=2)
    plain = seconds("plain", RECIPE, 0.5, 10, slow)
    ways: tuple[Way, ...] = ("reuse", "cache", "reuse and cache")
    assert [seconds(way, RECIPE, 0.5, 10, slow) for way in ways] == [plain] * 3
