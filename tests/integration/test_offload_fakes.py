"""The table of earlier results that the fakes of all traces share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from offload import capture_training_step
from offload.torch_seams import FakeTensorMode, storage_key
from offload.tracing import fakes
from offload.tracing.capture import capture
from offload.tracing.fakes import APART, Fakes

aten: Any = torch.ops.aten


@pytest.fixture(autouse=True)
def begins_with_none() -> Iterator[None]:
    FakeTensorMode.cache_clear()
    yield
    FakeTensorMode.cache_clear()


def convnet() -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 5))


def trained(module: nn.Module, *batch: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(module.parameters())
    capture_training_step(module, functional.cross_entropy, optimizer, *batch)


def test_a_step_that_was_traced_before_is_looked_up() -> None:
    batch = torch.rand(2, 3, 8, 8), torch.tensor([1, 3])
    trained(convnet(), *batch)
    first = FakeTensorMode.cache_info()
    trained(convnet(), *batch)
    second = FakeTensorMode.cache_info()
    assert first.misses == second.misses
    assert second.hits > first.hits


def test_a_table_that_has_grown_large_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.rand(2, 3, 8, 8), torch.tensor([1, 3])
    trained(convnet(), *batch)
    size = FakeTensorMode.cache_info().size
    assert size > 1
    Fakes()
    assert FakeTensorMode.cache_info().size == size
    monkeypatch.setattr(fakes, "MOST", size - 1)
    Fakes()
    assert FakeTensorMode.cache_info().size == 0


class Words(nn.Module):
    """Several layers, whose kernels keep a workspace only where autograd is on."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def test_what_depends_on_more_than_arguments_is_never_looked_up() -> None:
    module, x = Words(), torch.rand(2, 4, 6)

    def evaluation(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return module(x)

    for _ in range(2):
        capture(evaluation, x)
        trained(module, x, torch.tensor([0, 2]))


CALLS: dict[str, Callable[[], Any]] = {
    "native_batch_norm": lambda: [
        aten.native_batch_norm(_of(4, 3, 2), _of(3), _of(3), _of(3), _of(3), training, 0.1, 1e-5)
        for training in (True, False)
    ],
    "native_batch_norm_backward": lambda: [
        aten.native_batch_norm_backward(
            _of(4, 3, 2), _of(4, 3, 2), *[_of(3)] * 5, True, 1e-5, [True, *others]
        )
        for others in ([True, True], [False, False])
    ],
    "native_layer_norm": lambda: [aten.native_layer_norm(_of(4, 3), [3], _of(3), _of(3), 1e-5)],
    "native_layer_norm_backward": lambda: [
        aten.native_layer_norm_backward(
            _of(4, 3), _of(4, 3), [3], _of(4, 1), _of(4, 1), _of(3), _of(3), [True] * 3
        )
    ],
    "native_group_norm": lambda: [
        aten.native_group_norm(_of(4, 6, 2), _of(6), _of(6), 4, 6, 2, 3, 1e-5)
    ],
    "native_group_norm_backward": lambda: [
        aten.native_group_norm_backward(
            _of(4, 6, 2), _of(4, 6, 2), _of(4, 3), _of(4, 3), _of(6), 4, 6, 2, 3, [True] * 3
        )
    ],
    "convolution_backward": lambda: [
        aten.convolution_backward(
            _of(2, 4, 6), _of(2, 3, 8), _of(4, 3, 3), [4], [1], [0], [1], False, [0], 1, mask
        )
        for mask in ([True] * 3, [False, True, True])
    ],
    "var_mean": lambda: [aten.var_mean.correction(_of(4, 3), [0], correction=1)],
    "nll_loss_forward": lambda: [
        aten.nll_loss_forward(_of(4, 3), torch.ones(4, dtype=torch.long), None, how, -100)
        for how in range(3)
    ],
    "nll_loss2d_forward": lambda: [
        aten.nll_loss2d_forward(
            _of(4, 3, 2, 2), torch.ones(4, 2, 2, dtype=torch.long), None, how, -100
        )
        for how in range(3)
    ],
    "max_pool2d_with_indices": lambda: [aten.max_pool2d_with_indices(_of(2, 3, 4, 4), [2, 2])],
}


def _of(*size: int) -> torch.Tensor:
    return torch.ones(size)


@pytest.mark.parametrize("name", sorted(APART))
def test_results_that_are_looked_up_are_those_that_were_made(name: str) -> None:
    def described() -> list[Any]:
        with Fakes():
            made = CALLS[name]()
        for results in made:
            keys = [storage_key(one) for one in results if one is not None]
            assert len({*keys}) == len(keys), "two results share their memory"
        return [
            one if one is None else (one.dtype, one.size(), one.stride(), one.storage_offset())
            for results in made
            for one in results
        ]

    first, misses = described(), FakeTensorMode.cache_info().misses
    assert described() == first
    assert FakeTensorMode.cache_info().misses == misses
