"""What a peer adds up: gradients, exact sums, digests, groups of lanes, and what lanes log."""

import math
from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis import strategies as st
from support.products import examples

from trainers.elastic.deciding.header import LaneLogs, in_units
from trainers.elastic.errors import CannotBeElastic, FixedPointError
from trainers.elastic.work.digests import COLUMNS, PARTS, digest_of, part_of_step
from trainers.elastic.work.gradient_sums import BLOCK, FixedPoint, GradientSums
from trainers.elastic.work.plain_work import LogCatcher
from trainers.elastic.work.planned_work import FASTER, SIZES, best_size, next_size, together

# ---- gradients ----------------------------------------------------------------------------------


def two_layers() -> torch.nn.ModuleDict:
    torch.manual_seed(3)
    return torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 4)})


def test_backward_passes_add_up_in_one_flat_tensor() -> None:
    net, plain = two_layers(), two_layers()
    sums = GradientSums(list(net.named_parameters()))
    sums.begin()
    for scale in (1.0, 2.0):
        for module in (net, plain):
            (module["a"](torch.full((1, 3), scale)).square().sum()).backward()
    expected = [p.grad for p in plain["a"].parameters() if p.grad is not None]
    assert torch.equal(sums.flat[:8], torch.cat([g.reshape(-1) for g in expected]))
    assert not sums.flat[8:].any()
    assert sums.touched == "0x3"


def test_only_parameters_that_somebody_touched_are_given_a_gradient() -> None:
    net = two_layers()
    sums = GradientSums(list(net.named_parameters()))
    mean = torch.arange(24.0)
    sums.give(mean, "0x5")
    found = [p.grad for p in net.parameters()]
    assert found[1] is None and found[3] is None
    assert found[0] is not None and found[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found[2] is not None and found[2].reshape(-1).tolist() == [*range(8, 20)]


def test_parameters_whose_sums_are_not_finite_are_named() -> None:
    net = two_layers()
    sums = GradientSums(list(net.named_parameters()))
    assert sums.wrong_names() == []
    sums.flat[7], sums.flat[9] = math.nan, math.inf
    assert sums.wrong_names() == ["a.bias", "b.weight"]


def test_parameters_in_short_floats_are_refused() -> None:
    layer = torch.nn.Linear(2, 2).to(torch.bfloat16)
    with pytest.raises(CannotBeElastic, match=r"weight is of torch\.bfloat16.*in float32"):
        GradientSums(list(layer.named_parameters()))


# ---- digests ------------------------------------------------------------------------------------

BYTES = (1, 7, 8 * COLUMNS, 8 * COLUMNS * 3 + 5)


@pytest.mark.parametrize("size", BYTES)
def test_any_bit_changes_a_digest(size: int) -> None:
    made = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made)
    before = digest_of([data])
    assert digest_of([data.clone()]) == before
    for at in {0, size // 2, size - 1}:
        for bit in (0, 7):
            data[at] ^= 1 << bit
            assert digest_of([data]) != before
            data[at] ^= 1 << bit
    assert digest_of([data]) == before


def test_words_that_change_places_change_a_digest() -> None:
    words = torch.arange(3 * COLUMNS)
    before = digest_of([words])
    for one, other in ((0, 1), (0, COLUMNS), (5, 2 * COLUMNS + 9)):
        swapped = words.clone()
        swapped[[one, other]] = words[[other, one]]
        assert digest_of([swapped]) != before


def test_every_number_of_the_weights_has_its_turn_once_in_a_round() -> None:
    tensors = [torch.arange(1000), torch.arange(7), torch.tensor(5)]
    seen = [part_of_step(tensors, step) for step in range(5, 5 + PARTS)]
    for number, tensor in enumerate(tensors):
        found = torch.cat([parts[number] for parts in seen]).sort().values
        assert torch.equal(found, tensor.reshape(-1))


# ---- logs ---------------------------------------------------------------------------------------


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, ...]] = []

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        self.told.append((name, value, args, options))


def caught(*calls: dict[str, Any], size: int = 4) -> LaneLogs:
    net = Net()
    catcher = LogCatcher(net)
    catcher.begin()
    with catcher.catching(size):
        for call in calls:
            net.log(**call)
    assert net.told == []
    return LaneLogs(samples=size, values=catcher.values)


def test_lanes_are_logged_as_one_mean_over_samples() -> None:
    lanes = [caught({"name": "acc", "value": 0.5}), caught({"name": "acc", "value": 1.0}, size=12)]
    net = Net()
    LogCatcher(net).log(lanes[0].plus(lanes[1]))
    assert net.told == [("acc", 0.875, (), {"batch_size": 16})]


def test_logs_are_the_same_in_any_order_of_the_lanes() -> None:
    one, two, three = (caught({"name": "x", "value": v}) for v in (0.1, 1e9, -1e9))
    assert one.plus(two).plus(three) == three.plus(one.plus(two)) == two.plus(three).plus(one)


def test_options_come_back_and_calls_with_others_stay_apart() -> None:
    logs = caught(
        {"name": "a", "value": torch.tensor(1.0), "prog_bar": True, "logger": None},
        {"name": "a", "value": 3, "on_epoch": True},
    )
    net = Net()
    LogCatcher(net).log(logs)
    assert net.told == [
        ("a", 3.0, (), {"batch_size": 4, "on_epoch": True}),
        ("a", 1.0, (), {"batch_size": 4, "prog_bar": True}),
    ]


def test_what_is_not_finite_is_logged_as_such() -> None:
    logs = caught({"name": "a", "value": math.inf}).plus(caught({"name": "a", "value": 1.0}))
    net = Net()
    LogCatcher(net).log(logs)
    assert math.isnan(net.told[0][1])
    assert in_units(math.nan) is None


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"value": 1.0, "sync_dist": True}, "leave sync_dist out"),
        ({"value": 1.0, "rank_zero_only": True}, "leave rank_zero_only out"),
        ({"value": 1.0, "metric_attribute": "m"}, "log a number"),
        ({"value": 1.0, "reduce_fx": "max"}, "by their mean only"),
        ({"value": 1.0, "batch_size": 9}, "leave batch_size out"),
        ({"value": "text"}, "single numbers"),
        ({"value": torch.ones(2)}, "single numbers"),
    ],
)
def test_what_cannot_be_reduced_over_lanes_is_refused(call: dict[str, Any], why: str) -> None:
    with pytest.raises(CannotBeElastic, match=why) as refused:
        caught({"name": "acc", **call})
    assert "'acc'" in str(refused.value)


def test_options_by_place_are_refused_and_the_modules_log_is_back_after_a_lane() -> None:
    net = Net()
    catcher = LogCatcher(net)
    with pytest.raises(CannotBeElastic, match="by name"), catcher.catching(1):
        net.log("a", 1.0, True)
    net.log("b", 2.0)
    assert net.told == [("b", 2.0, (), {})]


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
