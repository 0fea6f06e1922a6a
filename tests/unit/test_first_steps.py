"""What of a planned step may differ from plain Lightning's, where kernels vary; and by how much."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainers.offloading.hardware.devices import MovedTensors, tensors_of
from trainers.offloading.hardware.target import Target
from trainers.offloading.steps.comparison import APART, DifferenceFound, ExpectedStep, no_room
from trainers.offloading.steps.first_steps import FirstSteps

LOSS = torch.tensor(1.0)
W = torch.ones(100)


def expected(noise: float, w: torch.Tensor = W) -> ExpectedStep:
    """By two turns that differ by so much in `w`, and in nothing else."""
    one = ExpectedStep.of({"w": w, "b": torch.ones(3)}, LOSS)
    other = ExpectedStep.of({"w": w + noise, "b": torch.ones(3)}, LOSS)
    return replace(one, apart=one.unlike(other))


def test_what_two_turns_make_alike_must_be_equal_to_the_last_bit() -> None:
    found = expected(1e-3)
    assert list(found.apart) == ["w"]
    found.compare_state({"w": W, "b": torch.ones(3)})
    off = torch.ones(3)
    off[1] = torch.nextafter(off[1], torch.tensor(2.0))
    with pytest.raises(DifferenceFound, match=r"^b differs"):
        found.compare_state({"w": W, "b": off})


def test_what_varies_may_be_off_by_a_few_times_what_it_varies_by() -> None:
    found = expected(1e-3)
    found.compare_state({"w": W + 0.9 * APART * 1e-3})
    with pytest.raises(DifferenceFound, match=r"^w differs .* 0\.08 would pass"):
        found.compare_state({"w": W + 1.1 * APART * 1e-3})
    with pytest.raises(DifferenceFound, match=r"^w differs"):
        found.compare_state({"w": torch.full((100,), torch.nan)})


def test_what_is_updated_on_the_host_may_be_off_by_a_few_units_in_the_last_place() -> None:
    found = ExpectedStep.of({"w": W, "b": torch.ones(3)}, LOSS).rounded(["w"])
    found.compare_state({"w": W * (1 + 2**-22)})
    with pytest.raises(DifferenceFound, match=r"^w differs"):
        found.compare_state({"w": W * (1 + 2**-19)})
    with pytest.raises(DifferenceFound, match=r"^b differs"):
        found.compare_state({"b": torch.ones(3) * (1 + 2**-22)})


def test_a_loss_that_varies_is_compared_alike() -> None:
    one = ExpectedStep.of({}, LOSS)
    found = replace(one, apart=one.unlike(ExpectedStep.of({}, LOSS + 0.01)))
    found.compare_loss({"loss": LOSS + 0.02})
    with pytest.raises(DifferenceFound, match=r"^the loss differs"):
        found.compare_loss(LOSS + 0.2)


def test_nan_in_both_is_no_difference_and_nan_in_one_is() -> None:
    assert expected(0.0, torch.full((100,), torch.nan)).apart == {}
    with pytest.raises(DifferenceFound, match=r"^w differs"):
        expected(0.0).compare_state({"w": torch.full((100,), torch.nan)})


def plan(peak: int) -> Any:
    return SimpleNamespace(peak_bytes=peak, device_bytes=1 << 20)


def test_without_room_the_check_is_left_out_with_one_warning() -> None:
    class Full(Target):
        def free_bytes(self) -> int:
            return 1 << 20

    assert no_room(plan(1 << 30), 1 << 30) == ""
    assert 0 < Target().free_bytes() < 1 << 60  # the host's memory
    first = FirstSteps(2)
    assert first.possible(plan(1 << 20), Full())
    with pytest.warns(UserWarning, match=r"not compared.*takes 1\.0 GiB .*1\.0 MiB are free there"):
        assert not first.possible(plan(1 << 30), Full())
    assert not first.due


def test_counters_of_an_optimizer_stay_on_the_host_but_for_fused_kernels() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    tensors = tensors_of(module, [optimizer])
    steps = [state["step"] for state in optimizer.state.values()]
    assert len(tensors) == 4 + 3 + 2 * 4
    assert not {id(step) for step in steps} & {id(tensor) for tensor in tensors}
    optimizer.param_groups[0]["fused"] = True
    assert len(tensors_of(module, [optimizer])) == len(tensors) + 4


class Far:
    """As much of a tensor as is needed, on a device that is not here."""

    def __init__(self, values: list[int], device: str) -> None:
        self.values, self.device, self.data = values, torch.device(device), self

    def to(self, device: torch.device) -> "Far":
        return Far(list(self.values), str(device))

    def copy_(self, other: "Far") -> None:
        self.values[:] = other.values


def owner(values: list[int], device: str) -> Any:
    home = Far(values, device)
    return SimpleNamespace(data=home, device=home.device, is_leaf=True, grad=None)


def test_tensors_that_were_away_come_home_with_the_values_of_now() -> None:
    streamed, resident = owner([1, 2], "cpu"), owner([3], "cuda:0")
    homes = streamed.data, resident.data
    away = MovedTensors([streamed, resident], torch.device("cuda:0"))
    assert streamed.data.device == torch.device("cuda:0") and streamed.data.values == [1, 2]
    assert resident.data is homes[1]
    streamed.data.values[0] = 7
    away.back()
    away.back()
    assert (streamed.data, resident.data) == homes
    assert homes[0].values == [7, 2]


def test_where_there_is_no_memory_all_are_at_home_again() -> None:
    class Full(Far):
        def to(self, device: torch.device) -> Far:
            raise torch.OutOfMemoryError("none left")

    first, second = owner([1], "cpu"), owner([2], "cpu")
    home, second.data = first.data, Full([2], "cpu")
    with pytest.raises(torch.OutOfMemoryError):
        MovedTensors([first, second], torch.device("cuda:0"))
    assert first.data is home
