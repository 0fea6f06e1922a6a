"""The covers of products.py against counting all there is."""

from itertools import combinations, product

import pytest
from support.products import diagonal, every_pair, pairwise


@pytest.mark.parametrize("lengths", [(4,), (3, 5), (2, 2, 2, 2), (4, 3, 2), (1, 6, 4, 2), (1, 1)])
def test_every_two_values_of_different_axes_meet_in_a_row(lengths: tuple[int, ...]) -> None:
    rows = pairwise(*lengths)
    for one, other in combinations(range(len(lengths)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == {*product(range(lengths[one]), range(lengths[other]))}
    for axis, length in enumerate(lengths):
        assert {row[axis] for row in rows} == {*range(length)}


def test_a_cover_is_small() -> None:
    assert len(pairwise(2, 2, 2, 2)) <= 6 and len(pairwise(4, 3, 2)) == 12
    assert len(pairwise(3, 5)) == 15, "of two axes there is nothing to leave out"


def test_a_diagonal_has_every_value_and_no_row_too_many() -> None:
    assert diagonal(3, 2) == [(0, 0), (1, 1), (2, 0)]


def test_a_product_is_whole_and_what_its_cover_leaves_out_is_marked_full() -> None:
    axes = (["a", "b"], [1, 2, 3], [True, False])
    rows = every_pair(*axes)
    assert [row.values for row in rows] == [*product(*axes)]
    quick = [row.values for row in rows if not row.marks]
    assert {(a, c) for a, _, c in quick} == {*product("ab", [True, False])}
    assert len(quick) == 6
    assert {mark.name for row in rows for mark in row.marks} == {"full"}
