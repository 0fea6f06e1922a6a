"""What `--check` says of reuse, a cache and a converted file: amounts worked by hand."""

from dataclasses import replace

import pytest

from perfect.commands.check_swarm import Feeding, decodes_with_cache, even_share, feeding_lines

GB = 10**9
RECIPE = [(4, 3), (3, 1)]
LARGE = Feeding(
    [(4, 3), (3, 1)], samples=1000, sample_bytes=100_000_000, cache_bytes=0, memory=8 * GB,
    disk=50 * GB,
)  # fmt: skip
"""100 GB of decoded samples: 15 epochs, 7 passes of decodes, even with a cache of 8 / 14."""


def test_the_decodes_of_every_way_are_counted() -> None:
    said, _ = feeding_lines(LARGE)
    assert said.startswith("decodes: 15,000 without reuse or cache, 7,000 with this reuse alone,")
    assert "1,000 with a cache or a converted file" in said
    assert said.endswith("this run 7,000")
    cached, _ = feeding_lines(replace(LARGE, cache_bytes=50 * GB))
    assert cached.endswith("this run 4,000")  # 1 + 6 / 2 passes


@pytest.mark.parametrize(
    ("run", "advice"),
    [
        (LARGE, "free memory holds 8%: a cache in it decodes more than this reuse"),
        (LARGE, "which a cache equals at 57%"),
        (replace(LARGE, memory=60 * GB), "a cache in it decodes less than this reuse"),
        (replace(LARGE, memory=101 * GB), "cache_bytes: 100000000000 would decode every sample"),
        (replace(LARGE, phases=[(15, 1)]), "reuse in the first phase decodes less"),
        (replace(LARGE, disk=101 * GB), "a converted file holds all of it"),
        (replace(LARGE, phases=[(1, 1)]), "nothing to gain: every sample is decoded at most once"),
        (replace(LARGE, cache_bytes=100 * GB), "nothing to gain: every sample is decoded at most"),
        (replace(LARGE, stalled=0.01), "nothing to gain: so far the run waited for samples dur"),
        (replace(LARGE, stalled=0.4), "a cache in it decodes more"),
    ],
)
def test_the_advice_names_the_way_that_there_is_room_for(run: Feeding, advice: str) -> None:
    _, said = feeding_lines(run)
    assert said.startswith("advice: ") and advice in said


def test_a_cache_of_the_even_share_decodes_as_much_as_reuse() -> None:
    share = even_share(RECIPE)
    assert share == pytest.approx(8 / 14)
    assert decodes_with_cache(15, share) == pytest.approx(7)
    assert decodes_with_cache(15, share + 0.01) < 7


@pytest.mark.parametrize("phases", [[(5, 1)], [(1, 1)], []])
def test_without_anything_to_save_no_cache_is_needed_to_match(
    phases: list[tuple[float, int]],
) -> None:
    assert even_share(phases) == 0.0


def test_in_a_single_pass_no_cache_helps_but_reuse_does() -> None:
    once = [(1, 3)]
    assert even_share(once) == even_share([(0.25, 3)]) == 1.0
