"""The Python of a guest's net runs in every request, and its weights may be changed between two."""

import copy
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning as L
import pytest
import torch
from support.accelerators import on_each_accelerator
from support.guest_runs import Clients, X, answers_alone, fitted, same, served
from torch import nn

from benchmarks.jobs.fleet_jobs import QUIET
from trainers import OffloadStrategy
from trainers.sharing.high_priority import HighPriority

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class Loads(L.Callback):
    """Gives a served net newer weights after every step."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.guests = net, list[HighPriority]()
        self.right = [answers_alone(net)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for guest in self.guests:
            with guest.held(), torch.no_grad():
                self.net[0].weight.copy_(pl_module.net[0].weight[:48])
                self.net[2].bias.add_(1)
                self.right.append(answers_alone(copy.deepcopy(self.net).cpu()))


@on_each_accelerator
@pytest.mark.parametrize("borrows", [False, True])
def test_weights_of_the_training_are_served_as_soon_as_they_are_loaded(
    borrows: bool, accelerator: str
) -> None:
    budget, own = ("60%", "16KiB") if accelerator == "cpu" else ("256MiB", "64MiB")
    net = served()
    alone = fitted(OffloadStrategy(budget=budget if borrows else None))
    strategy, loads = OffloadStrategy(budget=budget if borrows else None), Loads(net)

    def ask(_: int) -> tuple[int, torch.Tensor, int]:
        if not loads.guests:
            loads.guests.append(strategy.high_priority(net, own if borrows else None))
        before = len(loads.right)
        answer = loads.guests[0](X)
        return before, answer.cpu(), len(loads.right)

    clients = Clients(ask, count=1, first=3, most=6)
    beside = fitted(strategy, clients, callbacks=[clients, loads])
    last = loads.guests[0](X).cpu()
    loads.guests[0].close()
    assert not clients.errors
    assert len(loads.right) > 3
    for before, answer, after in clients.answers:
        assert any(answer.equal(right) for right in loads.right[before - 1 : after + 1])
    assert last.equal(answers_alone(net.cpu()))
    assert same(alone, beside)


def test_a_training_job_whose_states_come_later_borrows_and_has_its_bits() -> None:
    def job() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(11)
        net = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1))
        return net, torch.optim.AdamW(net.parameters(), 0.1)

    net, optimizer = job()
    expected = []
    for _ in range(5):
        optimizer.zero_grad()
        value = nn.functional.mse_loss(net(X), torch.zeros(5, 1))
        value.backward()
        optimizer.step()
        expected.append(value.detach())
    alone = fitted(OffloadStrategy(budget="80%"))
    again, its_optimizer = job()
    strategy, guests = OffloadStrategy(budget="80%"), list[HighPriority]()

    def ask(_: int) -> Any:
        if not guests:
            loss = nn.functional.mse_loss
            guests.append(
                strategy.high_priority(again, "16KiB", loss=loss, optimizer=its_optimizer)
            )
        return guests[0](X, torch.zeros(5, 1))

    clients = Clients(ask, count=1, first=3, most=5)
    beside = fitted(strategy, clients)
    guests[0].close()
    assert not clients.errors
    assert all(map(torch.equal, clients.answers, expected))
    assert same(alone, beside)
    assert same(dict(net.state_dict()), dict(again.state_dict()))


def test_python_that_draws_and_branches_runs_in_every_request() -> None:
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"sum": x.sum() * random.randint(1, 1000), "is_large": x.sum().item() > 0}

    random.seed(3)
    drawn = [X.sum() * random.randint(1, 1000) for _ in range(6)]
    random.seed(5)
    alone, left = fitted(OffloadStrategy()), random.random()
    random.seed(5)
    strategy = OffloadStrategy()
    with strategy.high_priority(Draws(), seed=3) as serve:
        clients = Clients(lambda _: serve(X), count=1, most=6)
        beside = fitted(strategy, clients)
    assert not clients.errors
    assert [found["sum"].item() for found in clients.answers] == [each.item() for each in drawn]
    assert all(found["is_large"] is (X.sum().item() > 0) for found in clients.answers)
    assert random.random() == left
    assert same(alone, beside)


class Slow(nn.Module):
    """Tells that a request has begun, and takes its time."""

    def __init__(self, begun: Callable[[], object]) -> None:
        super().__init__()
        self.begun, self.ended = begun, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ended = False
        self.begun()
        time.sleep(0.2)
        self.ended = True
        return x + 1


def test_a_ctrl_c_is_raised_when_the_request_is_over() -> None:
    net = Slow(lambda: signal.raise_signal(signal.SIGINT))
    with OffloadStrategy().high_priority(net) as serve:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                serve(X)
            assert net.ended
        net.begun = lambda: None
        assert torch.equal(serve(X), X + 1)


def test_the_end_of_the_block_waits_for_the_request_that_runs() -> None:
    begun = threading.Event()
    net = Slow(begun.set)
    with ThreadPoolExecutor(1) as other:
        with OffloadStrategy().high_priority(net) as serve:
            serve(X)
            begun.clear()
            asked = other.submit(serve, X)
            assert begun.wait(60)
        assert net.ended
        assert torch.equal(asked.result(60), X + 1)


def test_an_input_that_the_net_writes_is_written() -> None:
    with OffloadStrategy().high_priority(nn.Sequential(nn.ReLU(inplace=True))) as serve:
        for _ in range(4):
            x = X.clone()
            answer = serve(x)
            assert torch.equal(x, X.relu())
            assert torch.equal(answer, x)
