"""The kernels of a step run while Python is at the next one, and nobody can tell."""

import _thread
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload.live import planned_tapes
from offload.live.core import load_core, why_no_core
from offload.live.pending_step import EARLY_WAITS, PAUSED_STEPS
from offload.live.session import LiveSession
from offload.live.within import BudgetedLoop


class Slow:
    """What the operation `offload_tests::slow` does before it copies its argument."""

    def __init__(self) -> None:
        self.wait: Callable[[], object] = tuple


SLOW = Slow()


@torch.library.custom_op("offload_tests::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    SLOW.wait()
    return x.clone()


@slow.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


slow.register_autograd(lambda context, gradient: gradient)


@pytest.fixture(autouse=True)
def a_short_while() -> Iterator[None]:
    """Kernels are late enough that who does not wait for them finds other bytes."""
    if why := why_no_core():
        pytest.skip(why)
    SLOW.wait = lambda: time.sleep(0.01)
    yield
    SLOW.wait = tuple


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(dropout)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.dropout(self.norm(self.first(slow(x)).relu()))
        if self.last is not None:
            found = found + self.last
        self.last = found.detach().mean()
        return self.second(found)


class Loop:
    """A loop of somebody's, in which something happens between two steps."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        torch.manual_seed(1)
        self.net = Net(dropout)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 0.01, **options)
        self.batch = torch.randn(4, 8)
        self.seen: list[Any] = []

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.net(self.batch), self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, between: Callable[["Loop", torch.Tensor], object], steps: int = 6) -> "Loop":
        for _ in range(steps):
            between(self, self.step())
        return self

    def state(self) -> list[torch.Tensor]:
        states = (s for one in self.optimizer.state.values() for s in one.values())
        return [t.detach().clone() for t in (*self.net.state_dict().values(), *states)]


@contextmanager
def overlapping(loop: Loop, budget: str = "100%") -> Iterator[tuple[BudgetedLoop, list[bool]]]:
    """The loop within a budget, and of each step whether its kernels ran beside Python."""
    overlapped: list[bool] = []
    ask = LiveSession._submit

    def noted(self: LiveSession, *given: Any) -> bool:
        overlapped.append(ask(self, *given))
        return overlapped[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveSession, "_submit", noted)
        with offload.within(budget, loop.net, loop.optimizer, keep_gradients=True) as within:
            yield within, overlapped


def test_python_is_at_the_next_step_while_kernels_run() -> None:
    loop, begun = Loop(), threading.Event()
    seen: list[bool] = []
    with overlapping(loop):
        loop.run(look)
        SLOW.wait = lambda: seen.append(begun.wait(60))
        loop.step()
        begun.set()  # the kernels of the step above wait for this line
        loop.step()
    assert seen[0]


def rewrite(loop: Loop, loss: torch.Tensor) -> None:
    loop.batch.mul_(1.25)


def rewrite_in_another_thread(loop: Loop, loss: torch.Tensor) -> None:
    other = threading.Thread(target=loop.batch.mul_, args=(1.25,))
    other.start()
    other.join()


def rewrite_by_numpy(loop: Loop, loss: torch.Tensor) -> None:
    loop.batch.numpy()[:] *= 1.25


def replace(loop: Loop, loss: torch.Tensor) -> None:
    loop.batch = torch.randn(4, 8)


def look(loop: Loop, loss: torch.Tensor) -> None:
    loop.seen.append(loss.item())


def look_at_weights(loop: Loop, loss: torch.Tensor) -> None:
    loop.seen.append(loop.net.first.weight.tolist())


def look_at_gradients(loop: Loop, loss: torch.Tensor) -> None:
    loop.seen.append([p.grad.sum().item() for p in loop.net.parameters() if p.grad is not None])


def decay(loop: Loop, loss: torch.Tensor) -> None:
    with torch.no_grad():
        loop.net.first.weight.mul_(0.9)


def draw(loop: Loop, loss: torch.Tensor) -> None:
    loop.seen.append(torch.rand(3).tolist())


def seed(loop: Loop, loss: torch.Tensor) -> None:
    loop.seen.append(torch.get_rng_state().tolist())
    torch.manual_seed(5)


def count(loop: Loop, loss: torch.Tensor) -> None:
    for state in loop.optimizer.state.values():
        state["step"] += 1


def keep(loop: Loop, loss: torch.Tensor) -> None:
    loop.seen.append(loss)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "between",
    [
        rewrite, rewrite_in_another_thread, rewrite_by_numpy, replace, look, look_at_weights,
        look_at_gradients, decay, draw, seed, count, keep,
    ],
)  # fmt: skip
def test_what_happens_between_two_steps_sees_the_first_one_whole(
    between: Callable[[Loop, torch.Tensor], None], fused: bool
) -> None:
    dropout = 0.5 if between in (draw, seed) else 0.0
    plain = Loop(dropout, fused=fused).run(between)
    ours = Loop(dropout, fused=fused)
    for budget in ("100%", "60%"):
        ours = Loop(dropout, fused=fused)
        with overlapping(ours, budget) as (_, overlapped):
            ours.run(between)
        assert any(overlapped)
        assert all(map(torch.equal, ours.state(), plain.state()))
        assert [float(t) if isinstance(t, torch.Tensor) else t for t in ours.seen] == [
            float(t) if isinstance(t, torch.Tensor) else t for t in plain.seen
        ]


def test_an_error_of_a_late_kernel_is_raised_at_the_next_look_or_step() -> None:
    class Broken(Exception):
        pass

    def fail() -> None:
        raise Broken("late")

    for look_first in (True, False):
        loop = Loop()
        with pytest.raises(Broken, match="late"), overlapping(loop):
            loop.run(look)
            SLOW.wait = fail
            loss = loop.step()
            if look_first:
                with pytest.raises(Broken, match="late"):
                    loss.item()
                raise Broken("late")
            with suppress(ValueError):
                loop.step()


def test_an_interrupt_while_kernels_are_waited_for_leaves_them_whole() -> None:
    plain = Loop().run(lambda *_: None, 7)
    loop, waited_for = Loop(), threading.Event()

    def interrupt() -> None:
        waited_for.wait(60)
        time.sleep(0.05)
        _thread.interrupt_main()
        time.sleep(0.05)

    with overlapping(loop):
        loop.run(look)
        SLOW.wait = interrupt
        loss = loop.step()
        with pytest.raises(KeyboardInterrupt):
            waited_for.set()
            loss.item()
            time.sleep(60)
    assert all(map(torch.equal, loop.state(), plain.state()))


def tell_weights(net: Net, answers: Any) -> None:
    answers.put([parameter.detach().tolist() for parameter in net.parameters()])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_process_that_is_forked_between_two_steps_has_the_weights() -> None:
    """It has no thread of kernels, so it could not wait for one."""
    forking = multiprocessing.get_context("fork")
    answers, plain, loop = forking.SimpleQueue(), Loop().run(keep, 7), Loop()
    with overlapping(loop) as (_, overlapped):
        loop.run(look)
        loop.step()
        assert overlapped[-1]
        child = forking.Process(target=tell_weights, args=(loop.net, answers))
        child.start()
        child.join(60)
        child.kill()
        assert not answers.empty()
        tell_weights(plain.net, answers)
        assert answers.get() == answers.get()


def test_a_step_that_is_given_much_runs_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_tapes, "MOST_COPIED", 4 * 8 * 4 - 1)
    loop = Loop()
    with overlapping(loop) as (_, overlapped):
        loop.run(keep)
    assert not any(overlapped)


def test_kernels_beside_python_compute_as_its_thread_does() -> None:
    """The number of threads and what becomes of the smallest numbers are a thread's own."""
    core, seen = load_core(), []
    loop = Loop()
    threads, rounding = torch.get_num_threads(), core.rounding()
    with overlapping(loop):
        loop.run(look)
        SLOW.wait = lambda: seen.append((torch.get_num_threads(), core.rounding()))
        try:
            torch.set_num_threads(threads + 1)
            torch.set_flush_denormal(True)
            asked = torch.get_num_threads(), core.rounding()
            loop.step().item()
        finally:
            torch.set_num_threads(threads)
            core.set_rounding(rounding)
    assert seen == [asked]


def test_a_loop_that_looks_at_every_step_does_not_fly_for_a_while() -> None:
    loop = Loop()
    with overlapping(loop) as (_, overlapped):
        SLOW.wait = tuple
        loop.run(look, 12 + EARLY_WAITS)
        loop.run(lambda *_: None, PAUSED_STEPS)
    overlapped = [step for step, is_so in enumerate(overlapped) if is_so]
    assert overlapped[EARLY_WAITS] - overlapped[EARLY_WAITS - 1] == PAUSED_STEPS + 1
    assert all(overlapped[-2:])
