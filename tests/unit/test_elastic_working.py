"""What a peer adds up: gradients in one flat tensor, digests, and what its lanes log."""

import math
from typing import Any

import lightning as L
import pytest
import torch

from trainers.elastic.deciding.header import LaneLogs, in_units
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.work.digests import COLUMNS, PARTS, digest_of, part_of_step
from trainers.elastic.work.gradient_sums import ExactSums, GradientSums
from trainers.elastic.work.plain_work import LogCatcher

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


def test_a_new_step_begins_with_nothing() -> None:
    net = two_layers()
    sums = GradientSums(list(net.named_parameters()))
    sums.begin()
    net["a"](torch.ones(1, 3)).sum().backward()
    sums.end()
    assert all(p.grad is None for p in net.parameters())
    sums.begin()
    assert not sums.flat.any() and sums.touched == "0x0"
    net["b"](torch.ones(1, 3)).sum().backward()
    assert sums.touched == "0xc"


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


def test_exact_sums_take_lanes_and_begin_anew() -> None:
    exact = ExactSums(2, lanes=4)
    exact.begin()
    for lane in range(4):
        flat = torch.tensor([0.1, -3.0])
        exact.take(flat, f"lane {lane}")
    assert torch.equal(exact.floats(exact.sums), torch.tensor([0.4, -12.0]))
    exact.begin()
    assert not exact.sums.any()


# ---- digests ------------------------------------------------------------------------------------

SIZES = (1, 7, 8 * COLUMNS, 8 * COLUMNS * 3 + 5)


@pytest.mark.parametrize("size", SIZES)
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


def test_a_digest_takes_views_and_any_type_by_their_bytes() -> None:
    whole = torch.arange(8 * COLUMNS * 2 + 3, dtype=torch.int32)
    assert digest_of([whole[3:]]) == digest_of([whole[3:].clone()])
    table = torch.arange(12.0).reshape(3, 4)
    assert digest_of([table.t()]) == digest_of([table.t().contiguous()])
    assert digest_of([table.to(torch.bfloat16), torch.tensor(True)]) != digest_of([table])


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
