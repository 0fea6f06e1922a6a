"""Several threads have a session each: none of them notices the others."""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from support import live_cuts as cuts
from support import live_loops as loops
from support.live_loops import Loop
from torch import nn

from offload.graph.costs import Costs
from offload.live.session import LiveSession

pytestmark = pytest.mark.usefixtures("core")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SECONDS = 120
"""After which a thread has lost the others."""
NOT_THERE = "the bytes of this tensor are not there yet"


def session_of(loop: Loop, device: str, budget: str = "100%") -> LiveSession:
    where = f"{device}:0" if device == "cuda" else device
    return LiveSession(loop.net, loop.optimizer, budget=budget, device=where, costs=Costs())


def made(kinds: Sequence[Callable[[str], Loop]], device: str) -> list[Loop]:
    """Only the first of them draws from torch's own generator, which all threads share."""
    found = [kind(device) for kind in kinds]
    for loop in found[1:]:
        loop.net.dropout = nn.Identity()  # type: ignore[assignment]
    torch.manual_seed(7)
    return found


def alone(loop: Loop) -> list[Any]:
    for x, y in loop.batches:
        loop.step(x, y)
        loop.between()
    return seen(loop)


def seen(loop: Loop) -> list[Any]:
    return loop.result()[:-2]  # without the draws of all


def trained(loop: Loop, session: LiveSession, meet: Barrier, rounds: int) -> None:
    """Meets the others where all sessions are open, in the middle of every step and after it."""
    loss = loop.loss

    def met(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = loss(x, y)
        meet.wait(SECONDS)
        return made

    loop.loss = met  # type: ignore[method-assign]
    try:
        with session:
            meet.wait(SECONDS)
            for x, y in loop.batches:
                with session.step():
                    loop.step(x, y)
                loop.between()
                meet.wait(SECONDS)
        for _ in range(2 * (rounds - len(loop.batches))):
            meet.wait(SECONDS)
    except BaseException:
        meet.abort()
        raise


def together(found: Sequence[Loop], sessions: Sequence[LiveSession]) -> None:
    """A thread for each loop."""
    meet, rounds = Barrier(len(found)), max(len(loop.batches) for loop in found)
    with ThreadPoolExecutor(len(found)) as pool:
        pairs = zip(found, sessions, strict=True)
        runs = [pool.submit(trained, loop, session, meet, rounds) for loop, session in pairs]
        wait(runs, SECONDS)
    errors = [run.exception(0) for run in runs]
    for error in sorted(filter(None, errors), key=lambda one: isinstance(one, BrokenBarrierError)):
        raise error


KINDS = (
    (cuts.Item, loops.Scheduled),
    (loops.Loop, cuts.AnotherWayAfterACut),
    (loops.Checkpointed, cuts.ArrayForAWhile),
    (loops.Lengths, loops.Explicit, cuts.Numpy),
    (loops.Held, loops.Lengths, cuts.Item),
)
"""Of 6, 12 and 18 steps, so that the first, the last or the one between ends first."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", KINDS)
def test_every_thread_has_the_bits_that_it_has_alone(
    kinds: Sequence[type[Loop]], device: str
) -> None:
    plain = [alone(loop) for loop in made(kinds, device)]
    found = made(kinds, device)
    sessions = [session_of(loop, device) for loop in found]
    together(found, sessions)
    assert [seen(loop) for loop in found] == plain
    assert all(session.planned_steps > 0 for session in sessions)


@pytest.mark.parametrize("device", DEVICES)
def test_each_has_a_budget_of_its_own(device: str) -> None:
    kinds = (loops.Loop, loops.Scheduled)
    plain = [alone(loop) for loop in made(kinds, device)]
    found = made(kinds, device)
    sessions = [session_of(found[0], device, "70%"), session_of(found[1], device)]
    together(found, sessions)
    assert [seen(loop) for loop in found] == plain
    one, other = (session.plan for session in sessions)
    assert one is not None
    assert other is not None
    assert one.host_bytes > other.host_bytes


class Other:
    """Another thread, which lives as long as the test."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        return self._pool.submit(call, *args).result(SECONDS)


@pytest.fixture(params=["without", "with"])
def other(request: pytest.FixtureRequest) -> Iterator[Other]:
    """Without a session of its own, or with one."""
    thread = Other()
    net = nn.Linear(4, 4)
    session = LiveSession(net, budget="100%", costs=Costs())
    if request.param == "with":
        thread(session.__enter__)
    yield thread
    if request.param == "with":
        thread(session.__exit__, None, None, None)


TOUCHES: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.sum,
    lambda t: t.detach().add_(1),
    lambda t: t.detach().numpy(),
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    lambda t: copy.deepcopy(t.detach()),
    lambda t: torch.tensor([t.detach()[0, 0]]),
    lambda t: torch.zeros(2, 4).copy_(t),
)


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_shadow_raises_by_name_in_another_thread(
    touch: Callable[[torch.Tensor], Any], other: Other
) -> None:
    net, x, given = nn.Linear(4, 4), torch.ones(2, 4), torch.ones(2, 4)
    right = net(x).tolist()
    with LiveSession(net, budget="100%", costs=Costs()) as session:
        with session.step():
            net(x).sum()  # its weights have a home from now on
        for _ in range(2):
            with session.step():
                made = net(x)
                given.add_(1)
                for tensor in (made, given, net.weight):
                    with pytest.raises(RuntimeError, match=NOT_THERE):
                        other(touch, tensor)
            assert made.tolist() == right
    assert given.tolist() == [[3.0] * 4] * 2


def test_a_step_takes_real_tensors_of_another_session_and_no_shadows() -> None:
    thread, net, own = Other(), nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.ones(2, 4)
    right = (own(net(x)) + net.weight.sum()).tolist()
    others = LiveSession(own, budget="100%", costs=Costs())

    def step(y: torch.Tensor, weight: torch.Tensor) -> list[Any]:
        with others.step():
            made = own(y) + weight.sum()
        return made.tolist()

    with LiveSession(net, budget="100%", costs=Costs()) as session:
        thread(others.__enter__)
        with session.step():
            net(x).sum()  # its weights have a home from now on
        y = x
        for _ in range(3):
            with session.step():
                y = net(x)
                for given in ((y, x), (x, net.weight)):
                    with pytest.raises(RuntimeError, match=NOT_THERE):
                        thread(step, *given)
            assert net.weight.isfinite().all()  # its bytes are shown
            assert thread(step, y, net.weight) == right
    assert thread(step, y, net.weight) == right
    thread(others.__exit__, None, None, None)


def test_bytes_that_another_session_moves_are_neither_given_away_nor_taken(other: Other) -> None:
    net = nn.Linear(4, 4)
    with LiveSession(net, budget="100%", costs=Costs()) as session:
        with session.step():
            net(torch.ones(2, 4)).sum().backward()
        assert net.weight.isfinite().all()  # its bytes are shown
        with pytest.raises(RuntimeError, match="has this tensor, and moves its bytes"):
            other(net.weight.detach().numpy)
        assert net.weight.detach().numpy().shape == (4, 4)


@pytest.mark.parametrize("first", [0, 1])
def test_the_entrances_are_patched_until_the_last_session_ends(first: int) -> None:
    original = torch.Tensor.numpy
    threads = Other(), Other()
    sessions = [LiveSession(nn.Linear(2, 2)) for _ in threads]
    for thread, session in zip(threads, sessions, strict=True):
        thread(session.__enter__)
        assert torch.Tensor.numpy is not original
    assert torch.ones(2).numpy().tolist() == [1, 1]
    threads[first](sessions[first].__exit__, None, None, None)
    assert torch.Tensor.numpy is not original
    threads[1 - first](sessions[1 - first].__exit__, None, None, None)
    assert torch.Tensor.numpy is original


def test_a_session_ends_in_the_thread_that_opened_it() -> None:
    thread, session = Other(), LiveSession(nn.Linear(2, 2))
    thread(session.__enter__)
    with pytest.raises(RuntimeError, match="ends in the thread that opened it"):
        session.__exit__(None, None, None)
    thread(session.__exit__, None, None, None)
