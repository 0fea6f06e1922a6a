"""Fixed-point sums: any dealing of lanes and any order give the same bits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.elastic.errors import FixedPointError
from trainers.elastic.work.gradient_sums import BLOCK, FixedPoint

FLOATS = st.floats(-(2.0**14), 2.0**14, width=32)


@given(st.data())
def test_any_dealing_and_order_of_lanes_gives_the_same_bits(data: st.DataObject) -> None:
    lanes = data.draw(st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=9))
    form = FixedPoint(len(lanes))
    order = data.draw(st.permutations(range(len(lanes))))
    peers = [data.draw(st.integers(0, 2)) for _ in lanes]
    plain = torch.zeros(3, dtype=torch.int64)
    for lane in lanes:
        form.add(plain, torch.tensor(lane), "a lane")
    dealt = [torch.zeros(3, dtype=torch.int64) for _ in range(3)]
    for number in order:
        form.add(dealt[peers[number]], torch.tensor(lanes[number]), "a lane")
    total = dealt[2] + dealt[0] + dealt[1]
    assert torch.equal(total, plain)
    out, again = torch.empty(3), torch.empty(3)
    form.floats(plain, out)
    form.floats(total, again)
    assert out.view(torch.int32).tolist() == again.view(torch.int32).tolist()
    half_steps = len(lanes) * 2.0 ** -(form.fraction_bits + 1)
    for column, got in enumerate(out.tolist()):
        exact = math.fsum(lane[column] for lane in lanes)
        assert abs(got - exact) <= half_steps + abs(exact) * 2.0**-23


@given(st.integers(1, 1 << 24))
def test_all_lanes_at_the_limit_never_wrap(lanes: int) -> None:
    form = FixedPoint(lanes)
    one = torch.zeros(2, dtype=torch.int64)
    form.add(one, torch.tensor([2.0**14, -(2.0**14)]), "a lane")
    assert [int(n) * lanes for n in one] == (one * lanes).tolist()
    assert lanes * 2**14 << form.fraction_bits <= 2**62


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**14 + 1, -3e38])
def test_a_number_without_a_place_is_named_and_nothing_is_added(bad: float) -> None:
    gradient = torch.ones(BLOCK + 10)
    gradient[BLOCK + 3] = bad
    sums = torch.zeros(BLOCK + 10, dtype=torch.int64)
    with pytest.raises(FixedPointError, match=f"lane 5: number {BLOCK + 3} of"):
        FixedPoint(8).add(sums, gradient, "lane 5")
    assert not sums.any()


def test_sums_out_of_what_the_lanes_can_reach_are_refused() -> None:
    form = FixedPoint(1)
    sums = torch.zeros(1, dtype=torch.int64)
    form.add(sums, torch.tensor([2.0**14]), "lane 0")
    form.add(sums, torch.tensor([2.0**14]), "lane 0")
    with pytest.raises(FixedPointError, match="more than once"):
        form.floats(sums, torch.empty(1))
