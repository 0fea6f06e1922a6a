"""Flags that kernels go by: late kernels run by those that held when they were issued."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

import offload

pytestmark = pytest.mark.usefixtures("core")


@contextmanager
def changed(change: Callable[[], object], put_back: Callable[[], object]) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        put_back()


@contextmanager
def without_mkldnn() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def more_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


FLAGS = {
    "mkldnn": without_mkldnn,
    "threads": more_threads,
    "denormal numbers": lambda: changed(
        lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)
    ),
    "default dtype": lambda: changed(
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
}


class Net(nn.Module):
    """Whose bits depend on every one of these flags."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        self.shares: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, flag: Callable[[], object]) -> torch.Tensor:
        with flag():  # pyright: ignore[reportGeneralTypeIssues]
            found = self.second(self.first(x).relu())
            tiny = found.detach().abs().double() * 1e-310
            count = torch.ones(3, dtype=torch.int64, device=x.device)
            self.shares.append((count / 3).sum().double() + (tiny * 2).sum())
        return found.square().mean() + torch.randn(1 << 18, device=x.device).sum() * 1e-6


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("where", ["within a step", "between two steps"])
def test_kernels_run_by_the_flags_that_held_when_they_were_issued(name: str, where: str) -> None:
    def losses(*, ours: bool) -> list[float]:
        torch.manual_seed(3)
        net, x = Net(), torch.randn(4, 3, 12, 12)
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        kept: list[torch.Tensor] = []
        with offload.within("100%", net, optimizer) if ours else nullcontext():
            for number in range(7):
                is_set = number % 2 == 1
                inside = FLAGS[name] if where == "within a step" and is_set else nullcontext
                around = FLAGS[name] if where == "between two steps" and is_set else nullcontext
                with around():
                    loss = net(x, inside)
                    loss.backward()
                    kept.append(loss.detach())
                    optimizer.step()
                optimizer.zero_grad()
            sums = [parameter.detach().sum() for parameter in net.parameters()]
            return [float(one) for one in (*kept, *net.shares, *sums)]

    assert losses(ours=True) == losses(ours=False)


def test_a_capture_refuses_a_flag_that_the_step_sets() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with without_mkldnn():
            return x @ x

    with pytest.raises(offload.CaptureError, match="run at once"):
        offload.capture(step, torch.ones(4, 4))
    assert torch.backends.mkldnn.enabled


def test_a_flag_that_a_failed_step_has_set_is_put_back() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    rows, kept = torch.tensor([0, 7]), list[torch.Tensor]()
    with pytest.raises(IndexError), offload.within("100%", net, optimizer):
        for _ in range(2):
            net(torch.ones(3, 2))
            with without_mkldnn():
                kept.append(torch.ones(3, 2).index_select(0, rows))
    assert torch.backends.mkldnn.enabled
