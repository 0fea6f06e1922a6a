"""A loop whose Python runs on shadows in every step has eager's bits, within a budget."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload.errors import BudgetTooSmall, OffloadError
from offload.graph.costs import Costs
from offload.live.core import why_no_core
from offload.live.session import LiveSession

STEPS = 6
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def core() -> None:
    """It is compiled when the first of these tests runs."""
    if why := why_no_core():
        pytest.skip(why)


class Net(nn.Module):
    def __init__(self, width: int = 48, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.first(x)))
        for block in self.blocks:
            x = x + self.dropout(F.gelu(block(x)))
        return self.last(x)


class Loop:
    """A loop over a few batches. A case changes one part of it."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(3)
        self.device = device
        self.net = Net().to(device)
        self.batches = [
            (torch.randn(8, 16).to(device), torch.randint(4, (8,)).to(device)) for _ in range(STEPS)
        ]
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.seen: list[Any] = []
        self.calls = 0

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls += 1
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.append(loss.detach())

    def between(self) -> None:
        """What the loop does between two steps."""

    def result(self) -> list[Any]:
        """What is compared: what was seen, weights, states, and the generators."""
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        tensors = [*self.seen, *self.net.state_dict().values(), *states]
        found = [t.tolist() if isinstance(t, torch.Tensor) else t for t in tensors]
        return [
            *found,
            self.calls,
            torch.rand(()).item(),
            torch.rand((), device=self.device).item(),
        ]


def run(loop: Loop, session: LiveSession | None) -> list[Any]:
    with session or nullcontext():
        for x, y in loop.batches:
            with session.step() if session else nullcontext():
                loop.step(x, y)
            loop.between()
    return loop.result()


def compared(kind: Callable[[str], Loop], device: str, budget: str = "100%") -> LiveSession:
    """Runs the loop without us and with us, asserts that all is equal, and returns the session."""
    plain = run(kind(device), None)
    loop = kind(device)
    where = f"{device}:0" if device == "cuda" else device
    session = LiveSession(loop.net, loop.optimizer, budget=budget, device=where, costs=Costs())
    assert run(loop, session) == plain
    return session


class Scheduled(Loop):
    """Three numbers change from step to step: the rate, and two corrections of the bias."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def between(self) -> None:
        self.schedule.step()


class AnnealedInTheStep(Loop):
    """A number of the loss that Python computes, and a rate that is set in the middle of a step."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + self.calls)
        out = self.net(x)
        return F.cross_entropy(out, y) + 0.1 * self.calls * out.square().mean()


class Clipped(Loop):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls += 1
        for part in (slice(0, 4), slice(4, 8)):  # two micro-batches
            (self.loss(x[part], y[part]) / 2).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Autocast(Loop):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2, fused=True)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return super().loss(x, y)


class Checkpointed(Loop):
    """The forward pass of a block runs again within the backward pass, with the same draws."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = checkpoint(self.net, x, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        return F.cross_entropy(out, y)


class Held(Loop):
    """The loop keeps what a step made, and the next step reads it; weights are read by an alias."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.aliases = [p.data for p in self.net.parameters()]
        self.average = [p.detach().clone() for p in self.net.parameters()]
        self.latest = torch.zeros((), device=device)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x, y) + 0.1 * self.latest
        self.latest = loss.detach()
        return loss

    def between(self) -> None:
        for mean, weight in zip(self.average, self.aliases, strict=True):
            mean.lerp_(weight, 0.5)
        self.seen += [self.average[0].clone(), self.aliases[-1].sum()]


class WrittenBetween(Loop):
    """Somebody changes weights between two steps."""

    def between(self) -> None:
        with torch.no_grad():
            self.net.first.weight.mul_(0.5)


class Exposed(Loop):
    """Somebody has a view of a weight by numpy: its bytes must stay where they are."""

    def between(self) -> None:
        if self.device == "cpu":
            self.net.last.bias.detach().numpy()[0] += 1


class Asking(Loop):
    """Python asks for a value in the middle of a step, and goes another way by it."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x, y)
        if self.calls % 2 and loss > 0:
            self.seen.append(loss.item())
            return loss * 2
        return loss


class Lengths(Loop):
    """Three lengths of batches in turns, each often enough to be planned."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.batches = [
            (x[: 2 + n % 3], y[: 2 + n % 3]) for n, (x, y) in enumerate(self.batches * 3)
        ]


class Failing(Loop):
    """A step raises in its middle; what it issued before has happened, and the loop goes on."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        try:
            if self.calls == 4:
                self.calls += 1
                self.net(x).mean().backward()  # the statistics of the norm have changed
                raise ValueError("of the user's own")
            super().step(x, y)
        except ValueError:
            self.optimizer.zero_grad()


class Refilled(Loop):
    """Python writes into the memory of a batch while the step goes on."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.memory = torch.zeros(8, 16).numpy()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shared = torch.from_numpy(self.memory)
        self.memory[:] = self.calls
        first = shared.to(self.device, copy=True) * 2
        self.memory[:] = 7
        second = shared.to(self.device, copy=True) * 3
        self.memory[:] = 0
        return super().loss(x + first - second, y)


class Explicit(Loop):
    """A generator of the loop's own, whose state it reads between two draws."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.generator = torch.Generator(device).manual_seed(5)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn(x.shape, generator=self.generator, device=self.device)
        self.seen.append(self.generator.get_state())
        return super().loss(x, y)


PLANNED = [Loop, Scheduled, AnnealedInTheStep, Clipped, Autocast, Held, WrittenBetween, Explicit]
NOT_PLANNED = {
    Checkpointed: "it reads or sets the state of a random generator",
    Exposed: "uses memory that Python can reach by address",
    Asking: "_local_scalar_dense.default has to run at once",
    Refilled: "uses memory that Python can reach by address",
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", PLANNED)
def test_a_loop_has_eagers_bits_and_runs_by_a_plan(kind: type[Loop], device: str) -> None:
    session = compared(kind, device)
    assert session.planned_steps == STEPS - 2  # a first one, and one with the optimizer's state


@pytest.mark.parametrize("kind", NOT_PLANNED)
def test_what_is_not_planned_says_why_once_and_has_eagers_bits(kind: type[Loop]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compared(kind, "cpu")
    said = [str(one.message) for one in told]
    assert len([text for text in said if NOT_PLANNED[kind] in text]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*NOT_PLANNED, Failing])
@pytest.mark.filterwarnings("ignore:a step runs as it is issued")
def test_what_is_not_planned_has_eagers_bits_on_a_gpu(kind: type[Loop]) -> None:
    compared(kind, "cuda")


def test_a_step_that_raises_leaves_what_eager_leaves() -> None:
    assert compared(Failing, "cpu").planned_steps > 0


@pytest.mark.parametrize("device", DEVICES)
def test_weights_come_and_go_within_a_budget(device: str) -> None:
    session = compared(Held, device, budget="70%")
    assert session.plan is not None
    assert session.plan.host_bytes > 0


@pytest.mark.parametrize("device", DEVICES)
def test_every_length_has_a_tape_and_a_plan(device: str) -> None:
    session = compared(Lengths, device)
    assert session.planned_steps == 3 * STEPS - 4


def test_a_budget_without_room_is_refused_and_the_weights_are_whole() -> None:
    loop = Loop("cpu")
    with pytest.raises(BudgetTooSmall, match="are needed at task"):
        run(loop, LiveSession(loop.net, loop.optimizer, budget="1KiB", costs=Costs()))
    assert all(p.isfinite().all() for p in loop.net.parameters())


class Kept(Loop):
    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()


def test_a_gradient_that_is_read_after_a_planned_step_is_refused_by_name() -> None:
    loop = Kept("cpu")
    gradient = loop.net.last.bias
    with LiveSession(loop.net, loop.optimizer, costs=Costs()) as session:
        for x, y in loop.batches:
            with session.step():
                loop.step(x, y)
        assert session.planned_steps > 0
        assert gradient.grad is not None
        with pytest.raises(RuntimeError, match="it is a gradient"):
            gradient.grad.sum()


def test_everything_can_be_read_after_the_session_and_copied_within_it() -> None:
    loop = Loop("cpu")
    with LiveSession(loop.net, loop.optimizer, costs=Costs()) as session:
        for x, y in loop.batches:
            with session.step():
                loop.step(x, y)
        within = copy.deepcopy(loop.net.state_dict())
    assert all(torch.equal(within[name], t) for name, t in loop.net.state_dict().items())
    assert [loss.numpy().shape for loss in loop.seen] == [()] * STEPS


@pytest.fixture
def open_session() -> Iterator[LiveSession]:
    with LiveSession(nn.Linear(2, 2)) as session:
        yield session


def test_a_session_within_a_session_is_refused(open_session: LiveSession) -> None:
    with pytest.raises(RuntimeError, match="a live session is open already"):
        LiveSession(nn.Linear(2, 2)).__enter__()


def test_a_step_within_a_step_is_refused(open_session: LiveSession) -> None:
    refused = pytest.raises(RuntimeError, match="a step begins within another one")
    with open_session.step(), refused, open_session.step():
        pass


def test_without_a_compiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.live.core._once", lambda: "no C++ compiler was found")
    with pytest.raises(OffloadError, match="cannot run on shadows here: no C\\+\\+ compiler"):
        LiveSession(nn.Linear(2, 2))
