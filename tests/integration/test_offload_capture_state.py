"""What a step finds or leaves in Python, and what differs by call, is named and put back."""

import random
from collections import deque
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from support.offload_counting import BATCH, Counting, train
from torch import nn
from torch.nn import functional

from offload.errors import CaptureError
from offload.tracing.capture import traced as capture

HERE = Path(__file__)


class Hidden:
    """Counts where no spy on attributes sees it."""

    count = 0

    def next(self) -> int:
        object.__setattr__(self, "count", object.__getattribute__(self, "count") + 1)
        return object.__getattribute__(self, "count")


class Remembering(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.seen.append(y.detach())
        return y


class Filing(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, deque[Any]] = {"last": deque()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.files["last"].append(y)
        return y


class Caching(Counting):
    cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cached is None:
            self.cached = torch.arange(3.0)
        return self.linear(x * self.cached)


class Measuring(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.loss = torchmetrics.MeanMetric(nan_strategy="disable")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.loss(y.mean().detach())
        return y


class Replacing(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x - self.mean)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Counting, "calls changes from 1 to 2"),
        (Remembering, r"seen\[0\] keeps a tensor"),
        (Filing, r"files\['last'\]\[0\] keeps a tensor"),
        (Caching, "cached keeps a tensor"),
        (Measuring, "loss"),
        (Replacing, "mean"),
    ],
)
def test_what_a_module_keeps_in_python_is_named_and_put_back(make: Any, said: str) -> None:
    module = make()
    before = {**module.__dict__}
    with pytest.raises(CaptureError, match=said):
        train(module)
    assert module.__dict__ == before
    assert module.calls == 0
    assert module.seen == []
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in module.state_dict().values())


def test_a_cache_that_is_filled_is_a_constant() -> None:
    module = Caching()
    module(BATCH[0])
    graph = train(module)
    assert any(t is module.cached for t in graph.program.tensors.values())


def test_an_object_that_the_loss_closes_over_is_watched_too() -> None:
    class Log:
        last: Any = None

    log = Log()

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        log.last = functional.cross_entropy(out, y)
        return log.last

    with pytest.raises(CaptureError, match=r"log\.last keeps a tensor"):
        train(nn.Linear(3, 2), loss)
    assert log.last is None


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_dice_of_python_are_named_and_put_back(draw: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * float(draw())

    states = random.getstate(), repr(np.random.get_state())
    with pytest.raises(CaptureError, match="random, and every step would use the number drawn now"):
        capture(step, torch.ones(3))
    assert states == (random.getstate(), repr(np.random.get_state()))


def test_a_number_that_differs_by_call_is_found_by_comparing_two_traces() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * perf_counter_ns()

    with pytest.raises(CaptureError, match="two calls of the step do different things") as caught:
        capture(step, torch.ones(3))
    assert f"{HERE.name}:" in str(caught.value)


def test_an_op_that_comes_only_now_and_then_is_found() -> None:
    turns = Hidden()

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + 1 if turns.next() % 2 else y

    with pytest.raises(CaptureError, match="two calls of the step"):
        capture(step, torch.ones(3))


def test_a_result_that_differs_by_call_is_found() -> None:
    numbers = Hidden()

    def step(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, numbers.next()

    with pytest.raises(CaptureError, match="what it returns"):
        capture(step, torch.ones(3))
