"""The lengths that texts are padded to are the best of all, and few."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from perfect.text.padding import (
    MOST,
    MULTIPLE,
    WASTE,
    chosen_lengths,
    lengths_for,
    longest_of_batches,
    padded,
)

counts = st.dictionaries(st.integers(1, 300), st.integers(1, 50), min_size=1, max_size=12)
weights = st.dictionaries(st.integers(1, 60), st.floats(0, 10), min_size=1, max_size=7)


@settings(max_examples=examples(200))
@given(weights, st.integers(1, 8))
def test_no_other_lengths_pad_less(found: dict[int, float], most: int) -> None:
    chosen = chosen_lengths(found, most)
    assert chosen == tuple(sorted(set(chosen))) and chosen[-1] == max(found)
    assert len(chosen) <= most and {*chosen} <= {*found}
    shorter = sorted(found)[:-1]
    others = [
        (*some, max(found))
        for count in range(min(most - 1, len(shorter)) + 1)
        for some in combinations(shorter, count)
    ]
    least = min(padded(found, lengths) for lengths in others)
    assert padded(found, chosen) == pytest.approx(least)


@settings(max_examples=examples(200))
@given(counts, st.integers(1, 64), st.integers(0, 100))
def test_a_few_lengths_waste_little_and_hold_every_sample(
    found: dict[int, int], batch: int, more: int
) -> None:
    longest = max(found) + more
    lengths = lengths_for(found, batch, longest)
    assert lengths == tuple(sorted(set(lengths))) and lengths[-1] == longest
    assert len(lengths) <= MOST
    assert all(length % MULTIPLE == 0 for length in lengths[:-1])
    rounded: dict[int, int] = {}
    for length, count in found.items():
        least = min(-(-length // MULTIPLE) * MULTIPLE, longest)
        rounded[least] = rounded.get(least, 0) + count
    shares = longest_of_batches(rounded, batch)
    if len(lengths) < MOST:
        ideal = sum(length * share for length, share in shares.items())
        assert padded(shares, lengths) <= (1 + WASTE) * ideal * (1 + 1e-9)


@given(counts, st.integers(1, 64))
def test_the_longest_of_a_batch_is_one_of_its_samples(found: dict[int, int], batch: int) -> None:
    shares = longest_of_batches(found, batch)
    assert shares.keys() == found.keys()
    assert all(share >= 0 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1)
    if batch == 1:
        whole = sum(found.values())
        assert shares == pytest.approx({length: n / whole for length, n in found.items()})


def test_texts_of_one_length_need_one_graph_and_two_kinds_need_two() -> None:
    assert lengths_for({50: 1000}, 16, 50) == (50,)
    assert lengths_for({16: 1000, 512: 2}, 8, 512) == (16, 512)
