"""Loops whose steps read and write what is no module's, and no tensor: live steps have eager's
values in all of them, between any two lines."""

import ctypes
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload.live.core import why_no_core

STEPS = 9
Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def core() -> None:
    if why := why_no_core():
        pytest.skip(why)


def of_a_record() -> Iterator[Step]:
    record = np.array([(0.5, 1)], dtype=[("scale", "f4"), ("count", "i4")])

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        record["count"] += 1
        record["scale"] *= 0.9
        return net(x).square().mean() * float(record["scale"][0]) + int(record["count"][0])

    yield step


def of_a_shared_value() -> Iterator[Step]:
    value = multiprocessing.Value("d", 0.5)

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value.value *= 1.1
        return net(x).square().mean() * value.value

    yield step


def of_ctypes() -> Iterator[Step]:
    number = ctypes.c_double(2.0)
    pointer = ctypes.pointer(number)

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        pointer.contents.value -= 0.1
        return net(x).square().mean() * number.value

    yield step


def of_an_event() -> Iterator[Step]:
    event = threading.Event()

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        event.clear() if event.is_set() else event.set()
        return net(x).abs().mean() if event.is_set() else net(x).square().mean()

    yield step


def of_a_proxy() -> Iterator[Step]:
    own = {"a": 0.5, "b": 2.0}
    seen = MappingProxyType(own)

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        own["a"], own["b"] = own["b"], own["a"]
        if len(own) < 6:
            own[f"c{len(own)}"] = 1.5
        found = net(x).mean()
        for name in seen:
            found = found * 0.9 + seen[name]
        return found * found

    yield step


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            return x * self.factor
        return x + self.factor


def of_a_script() -> Iterator[Step]:
    scripted = torch.jit.script(Scripted())

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scripted.factor = scripted.factor + 0.25
        return scripted(net(x)).square().mean()

    yield step


def of_a_swapped_class() -> Iterator[Step]:
    class Double(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(net, nn.Sequential)
        last = net[-1]
        last.__class__ = nn.Linear if type(last) is Double else Double
        return net(x).square().mean()

    yield step


def of_a_patched_function() -> Iterator[Step]:
    plain, calls = functional.relu, [0]

    def leaky(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        calls[0] += 1
        return plain(x) + 0.1 * (calls[0] % 3) * x

    functional.relu = leaky
    try:
        yield lambda net, x: net(x).square().mean()
    finally:
        functional.relu = plain


def of_a_batchs_gradient() -> Iterator[Step]:
    norms = [1.0]

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        net(leaf).sum().backward()
        assert leaf.grad is not None
        norms.append(leaf.grad.norm().item())
        return net(x + 0.1 * leaf.grad).square().mean() * norms[-2]

    yield step


def of_an_error_that_is_caught() -> Iterator[Step]:
    calls = [0]

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        matrix = torch.eye(3) * (1.0 if calls[0] % 2 else 0.0)
        try:
            torch.linalg.cholesky(matrix)
            factor = 1.0
        except torch.linalg.LinAlgError:
            factor = 3.0
        return net(x).square().mean() * factor

    yield step


def of_a_refilled_buffer() -> Iterator[Step]:
    buffer = np.ones(6, dtype=np.float32)
    tensor = torch.from_numpy(buffer)

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = net(x * tensor)
        buffer[:] = buffer * 1.1 + 0.1
        return (first * net(x * tensor)).mean()

    yield step


def of_sparse_rows() -> Iterator[Step]:
    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = torch.sparse_coo_tensor(torch.tensor([[0, 1, 3]]), x[:3], (4, 6))
        return net(torch.sparse.mm(torch.eye(4).to_sparse(), rows.to_dense())).square().mean()

    yield step


def of_an_own_generator() -> Iterator[Step]:
    generator = torch.Generator().manual_seed(4)

    def step(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(4, 6, generator=generator)
        again = generator.get_state()
        half = torch.rand(4, 6, generator=generator)
        generator.set_state(again)
        return net(x + 0.1 * noise).square().mean() + half.mean()

    yield step


CASES = (
    of_a_record,
    of_a_shared_value,
    of_ctypes,
    of_an_event,
    of_a_proxy,
    of_a_script,
    of_a_swapped_class,
    of_a_patched_function,
    of_a_batchs_gradient,
    of_an_error_that_is_caught,
    of_a_refilled_buffer,
    of_sparse_rows,
    of_an_own_generator,
)


def trained(case: Callable[[], Iterator[Step]], budget: str | None) -> list[Any]:
    """Every loss and weight of a loop, as soon as they are there."""
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    seen: list[Any] = []
    for step in case():
        with offload.within(budget, net, optimizer) if budget else nullcontext():
            for number in range(STEPS):
                optimizer.zero_grad()
                loss = step(net, torch.randn(4, 6))
                loss.backward()
                optimizer.step()
                if number % 2:
                    seen += [loss.item(), [p.tolist() for p in net.parameters()]]
        seen += [p.tolist() for p in net.parameters()]
    return seen


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("budget", ["100%", "60%"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_step_sees_what_it_would_see_without_us(
    case: Callable[[], Iterator[Step]], budget: str
) -> None:
    assert trained(case, budget) == trained(case, None)
