"""Requests of high priority beside a training: bits, memory, bad inputs."""

import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.accelerators import CPU, GPU, on_each_accelerator
from support.guest_runs import Clients, X, answers_alone, fitted, same, served
from torch import nn

from benchmarks.jobs.fleet_jobs import QUIET
from offload import BudgetTooSmall, OffloadError, StepError
from trainers import OffloadStrategy
from trainers.sharing.high_priority import HighPriority

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = {thread.ident for thread in threading.enumerate()}
    yield
    left = [t.name for t in threading.enumerate() if t.ident not in before]
    assert not left


# ---- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "reserve", "accelerator"),
    [
        (None, None, CPU),
        ("1MiB", "64KiB", CPU),
        pytest.param(None, None, GPU, marks=pytest.mark.gpu),
        pytest.param("256MiB", "64MiB", GPU, marks=pytest.mark.gpu),
    ],
    indirect=["accelerator"],
)
def test_answers_and_the_training_have_the_bits_that_each_has_alone(
    budget: str | None, reserve: str | None, accelerator: str
) -> None:
    alone = fitted(OffloadStrategy(budget=budget))
    net = served()
    expected = answers_alone(net)
    strategy = OffloadStrategy(budget=budget)
    with strategy.high_priority(net, reserve) as serve:
        clients = Clients(lambda _: serve(X))
        beside = fitted(strategy, clients)
    assert not clients.errors
    assert len(clients.answers) > 2
    assert all(torch.equal(answer, expected) for answer in clients.answers)
    assert same(alone, beside)
    waits = serve.waits
    assert len(waits.starts) == len(clients.answers)
    assert all(0 <= start <= end for start, end in zip(waits.starts, waits.answers, strict=True))


def test_a_guest_that_comes_later_borrows_the_arena_and_leaves_every_bit() -> None:
    budget = "60%"
    alone = fitted(OffloadStrategy(budget=budget))
    net = served()
    expected = answers_alone(net)
    strategy = OffloadStrategy(budget=budget)
    guests: list[HighPriority] = []

    def ask(_: int) -> torch.Tensor:
        if not guests:
            guests.append(strategy.high_priority(net, "16KiB"))
        return guests[0](X)

    clients = Clients(ask, count=1, first=3, most=3)
    beside = fitted(strategy, clients)
    guests[0].close()
    assert not clients.errors
    assert len(clients.answers) > 2
    assert all(torch.equal(answer, expected) for answer in clients.answers)
    assert same(alone, beside)
    assert torch.equal(answers_alone(net), expected)


def test_a_training_job_of_high_priority_draws_its_own_numbers() -> None:
    def job() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(11)
        net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 1))
        return net, torch.optim.SGD(net.parameters(), 0.1)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).square().mean()

    y = torch.zeros(5, 1)
    net, optimizer = job()
    torch.manual_seed(5)
    expected = []
    for _ in range(6):
        optimizer.zero_grad()
        value = loss(net(X), y)
        value.backward()
        optimizer.step()
        expected.append(value.detach())
    alone = fitted(OffloadStrategy())
    again, its_optimizer = job()
    strategy = OffloadStrategy()
    with strategy.high_priority(again, loss=loss, optimizer=its_optimizer, seed=5) as step:
        clients = Clients(lambda n: step(X, y), count=1, most=6)
        beside = fitted(strategy, clients)
    assert not clients.errors
    assert len(clients.answers) == 6
    assert all(map(torch.equal, clients.answers, expected))
    assert same(alone, beside)
    assert same(dict(net.state_dict()), dict(again.state_dict()))


# ---- memory -------------------------------------------------------------------------------------


def test_a_reserve_is_taken_off_the_budget_of_the_training() -> None:
    strategy = OffloadStrategy(budget="100%")
    fitted(strategy)
    whole = strategy.plan.device_bytes
    strategy = OffloadStrategy(budget=whole)
    with strategy.high_priority(served(), 15_000):
        fitted(strategy)
    assert strategy.plan.device_bytes <= whole - 15_000
    strategy = OffloadStrategy(budget="1MiB")
    with (
        strategy.high_priority(served(), "1MiB"),
        pytest.raises(OffloadError, match=r"used up by 1.0 MiB that are reserved for requests"),
    ):
        fitted(strategy)


def test_what_its_budget_does_not_hold_is_told_and_the_training_goes_on() -> None:
    alone = fitted(OffloadStrategy())
    strategy = OffloadStrategy()
    with strategy.high_priority(served(), 1000) as serve:
        clients = Clients(lambda _: serve(X), count=1)
        beside = fitted(strategy, clients)
    [error] = clients.errors
    assert isinstance(error, BudgetTooSmall)
    assert same(alone, beside)


# ---- bad input ----------------------------------------------------------------------------------


class Calls(L.Callback):
    """Calls something in the thread of the training, before a batch and in the middle of a step."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def on_train_batch_start(self, *_: Any) -> None:
        self._call()


def test_a_call_from_the_trainings_own_thread_is_refused() -> None:
    strategy = OffloadStrategy()
    errors: list[str] = []
    with strategy.high_priority(served()) as serve:

        def call() -> None:
            if strategy.plans:
                with pytest.raises(StepError, match="comes from the thread that trains") as found:
                    serve(X)
                errors.append(str(found.value))

        fitted(strategy, None, callbacks=[Calls(call)])
    assert errors


class Words(nn.Module):
    """Raises in the middle of a captured run: a row that its table lacks is seen only there."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(rows))


@pytest.mark.parametrize("budget", [None, "16KiB"])
def test_a_request_that_raises_in_the_middle_harms_neither_the_next_one_nor_the_training(
    budget: str | None,
) -> None:
    share = "60%" if budget else None
    alone = fitted(OffloadStrategy(budget=share))
    torch.manual_seed(7)
    net, rows, unknown = Words().eval(), torch.tensor([1, 2, 3]), torch.tensor([1, 99, 3])
    with torch.no_grad():
        expected = net(rows)
    strategy = OffloadStrategy(budget=share)
    guests: list[HighPriority] = []
    caught: list[str] = []

    def ask(_: int) -> torch.Tensor:
        if not guests:  # in a run with a budget this one borrows
            guests.append(strategy.high_priority(net, budget))
            guests[0](rows)
        with pytest.raises(IndexError, match="out of range") as found:
            guests[0](unknown)
        caught.append(str(found.value))
        return guests[0](rows)

    clients = Clients(ask, count=1, first=3, most=3)
    beside = fitted(strategy, clients)
    guests[0].close()
    assert not clients.errors
    assert caught
    assert all(torch.equal(answer, expected) for answer in clients.answers)
    assert same(alone, beside)


def test_each_shape_has_the_nets_bits() -> None:
    net = served()
    strategy = OffloadStrategy()
    shapes = [X, X[:2], X[:3]]
    with strategy.high_priority(net) as serve, torch.no_grad():
        clients = Clients(lambda n: (n, serve(shapes[n])), count=3)
        fitted(strategy, clients)
        assert not clients.errors
        assert all(torch.equal(answer, net(shapes[n])) for n, answer in clients.answers)


def test_after_its_block_nothing_is_answered_and_options_that_do_not_fit_are_refused() -> None:
    strategy = OffloadStrategy(budget="1MiB")
    with pytest.raises(OffloadError, match="needs one, too"):
        strategy.high_priority(served())
    with pytest.raises(OffloadError, match="'much' is not a size"):
        strategy.high_priority(served(), "much")
    with pytest.raises(OffloadError, match="needs both loss= and optimizer="):
        strategy.high_priority(served(), "64KiB", loss=lambda a, b: a)
    with strategy.high_priority(served(), "64KiB") as serve:
        before = serve(X)
    assert torch.equal(before, answers_alone(served()))  # no training runs: it is answered at once
    with pytest.raises(OffloadError, match="its block was left"):
        serve(X)


# ---- what is told -------------------------------------------------------------------------------


def test_loggers_and_explain_tell_what_requests_took(tmp_path: Path) -> None:
    strategy = OffloadStrategy()
    logger = CSVLogger(tmp_path)
    with strategy.high_priority(served()) as serve:
        clients = Clients(lambda _: serve(X), count=1, most=3)
        fitted(strategy, clients, logger=logger)
        said = serve.waits.describe()
    logged = (Path(logger.log_dir) / "metrics.csv").read_text()
    shares = ("p50", "p95", "max")
    names = [f"{what}_{share}_ms" for what in ("start", "answer") for share in shares]
    for name in ("requests", "training_stood_aside_s", *names):
        assert f"sharing/{name}" in logged
    assert said.startswith("3 requests; p50 / p95 / max:")


# ---- weights that change, Ctrl-C, the end of the block ------------------------------------------


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


def test_a_ctrl_c_between_the_request_and_its_wait_ends_after_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit, hits = ThreadPoolExecutor.submit, [1]

    def submit_and_hit(self: ThreadPoolExecutor, *given: Any, **named: Any) -> Any:
        done = submit(self, *given, **named)
        if hits:
            hits.clear()
            raise KeyboardInterrupt
        return done

    net = Slow(lambda: None)
    with OffloadStrategy().high_priority(net) as serve:
        assert torch.equal(serve(X), X + 1)
        net.ended = False
        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_and_hit)
        with pytest.raises(KeyboardInterrupt):
            serve(X)
        assert net.ended
        assert torch.equal(serve(X), X + 1)


def test_a_request_starts_no_thread_that_a_ctrl_c_could_make_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with OffloadStrategy().high_priority(nn.ReLU()) as serve:
        monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread starts"))
        assert torch.equal(serve(X), X.relu())
        monkeypatch.undo()


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
