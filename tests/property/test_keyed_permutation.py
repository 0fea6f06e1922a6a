"""The computed shuffle: a permutation of any size, and as uniform as numpy's.

Each statistic is a chi-square over cells that are equally likely in a uniform shuffle. With many
cells it is nearly normal, so it is given as standard deviations from its mean. `MOST` is a bound
that a uniform shuffle keeps in all but about one of 15,000 such statistics (with 2 cells in all but
one of 100). The seeds are fixed, so no test fails by chance. numpy's shuffle stands beside ours,
held to the same bound: it shows that the bound is one of a uniform shuffle.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.products import examples

from loaders.order.keyed_permutation import KeyedPermutation, shuffled

MOST = 4.0
law = settings(max_examples=examples(150), deadline=None)
Shuffle = Callable[[int, int], NDArray[np.int64]]
words = st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**20))


def ours(size: int, seed: int) -> NDArray[np.int64]:
    return KeyedPermutation(size, (seed, 0))(np.arange(size))


def a_sort_of_ours(size: int, seed: int) -> NDArray[np.int64]:
    return shuffled(size, seed, 0)


def numpys(size: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, 0)).permutation(size)


shuffles = pytest.mark.parametrize("shuffle", [ours, a_sort_of_ours, numpys])


# ---- laws ---------------------------------------------------------------------------------------


@law
@given(st.integers(0, 3000), words)
@example(0, (0, 0))
@example(1, (0, 0))
@example(2, (0, 0))
@example(3, (0, 0))
@example(255, (0, 0))
@example(256, (0, 0))
@example(257, (0, 0))
@example(1009, (0, 0))
def test_every_size_is_permuted(size: int, key: tuple[int, ...]) -> None:
    ids = KeyedPermutation(size, key)(np.arange(size))
    assert sorted(ids.tolist()) == list(range(size))
    assert sorted(shuffled(size, *key).tolist()) == list(range(size))


@law
@given(st.integers(1, 2**55), words, st.lists(st.integers(0, 2**55), min_size=1, max_size=20))
def test_an_id_depends_on_its_position_alone_and_no_two_positions_have_the_same(
    size: int, key: tuple[int, ...], wanted: list[int]
) -> None:
    positions = sorted({w % size for w in wanted})
    permuted = KeyedPermutation(size, key)
    ids = permuted(np.array(positions)).tolist()
    assert ids == [int(permuted(np.array([p]))[0]) for p in positions]
    assert len(set(ids)) == len(positions)
    assert all(0 <= i < size for i in ids)


def test_the_order_of_a_seed_never_changes() -> None:
    """Saved runs go on with it. Whoever changes it has to raise `ORDER_VERSION`."""
    assert ours(10, 0).tolist() == [9, 5, 7, 6, 1, 2, 3, 8, 0, 4]
    many = KeyedPermutation(10**9, (7, 3))
    assert many(np.arange(3)).tolist() == [907026572, 742869080, 657217604]
    assert a_sort_of_ours(10, 0).tolist() == [1, 8, 0, 9, 6, 7, 4, 2, 3, 5]


# ---- how uniform it is --------------------------------------------------------------------------


def deviations(counts: NDArray[np.int64], freedom: int) -> float:
    """How far the chi-square of equally likely cells lies from its mean."""
    expected = counts.sum() / counts.size
    found = float(((counts - expected) ** 2 / expected).sum())
    return (found - freedom) / math.sqrt(2 * freedom)


@shuffles
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_ids_are_equally_likely(shuffle: Shuffle, size: int) -> None:
    orders = {order: n for n, order in enumerate(itertools.permutations(range(size)))}
    counts = np.zeros(len(orders), dtype=np.int64)
    for seed in range(min(40, examples(40)) * len(orders)):
        counts[orders[tuple(shuffle(size, seed).tolist())]] += 1
    assert abs(deviations(counts, len(orders) - 1)) < MOST


@shuffles
@pytest.mark.parametrize("size", [160, 8_192, 100_000])
def test_ids_neighbours_and_steps_are_spread_evenly(shuffle: Shuffle, size: int) -> None:
    parts = 16
    places, neighbours, further = (np.zeros((parts, parts), dtype=np.int64) for _ in range(3))
    steps = np.zeros(parts, dtype=np.int64)
    every = np.arange(size) * parts // size
    for seed in range(max(2, 160_000 // size)):
        ids = shuffle(size, seed)
        part = ids * parts // size
        np.add.at(places, (every, part), 1)
        np.add.at(neighbours, (part[:-1:2], part[1::2]), 1)
        np.add.at(further, (part[:-100], part[100:]), 1)
        np.add.at(steps, (np.diff(ids)[::2] % size) * parts // size, 1)
    # A part that an id took has one place less for others: that is known, and small but at 160.
    few = size == 160
    assert abs(deviations(places, (parts - 1) ** 2)) < MOST
    assert few or abs(deviations(neighbours, parts**2 - 1)) < MOST
    assert few or abs(deviations(further, parts**2 - 1)) < MOST
    assert few or abs(deviations(steps, parts - 1)) < MOST


@shuffles
def test_two_passes_and_two_seeds_have_nothing_to_do_with_each_other(shuffle: Shuffle) -> None:
    parts, size = 16, 65_536
    counts = np.zeros((parts, parts), dtype=np.int64)
    for seed in range(4):
        one, other = (shuffle(size, s) * parts // size for s in (seed, seed + 1))
        np.add.at(counts, (one, other), 1)
    assert abs(deviations(counts, (parts - 1) ** 2)) < MOST
