"""A loop whose Python runs on shadows in every step has eager's bits, within a budget."""

import copy
import functools
import io
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import live_cuts as cuts
from support import live_loops as loops
from support.live_loops import STEPS, Loop
from torch import nn

from offload.errors import BudgetTooSmall, OffloadError, StepError
from offload.graph.costs import Costs
from offload.live.planned_tapes import PlannedTapes
from offload.live.session import LiveSession

pytestmark = pytest.mark.usefixtures("core")


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


PLANNED = (
    Loop,
    loops.Scheduled,
    loops.AnnealedInTheStep,
    loops.Clipped,
    loops.Autocast,
    loops.Held,
    loops.Explicit,
    loops.Replaced,
    loops.Tied,
    loops.Flagged,
    loops.AliasedInTurns,
    loops.Tries,
    cuts.Conjugated,
    loops.Copied,
    loops.FromTheHost,
    loops.CheckpointedWithoutDraws,
    cuts.NumbersOfTheHost,
)
CUT = (
    cuts.Item,
    cuts.NothingFound,
    cuts.Numpy,
    cuts.TwoCuts,
    cuts.AnotherWayAfterACut,
    cuts.RaisesAfterACut,
    cuts.WritesAfterACut,
    cuts.Hooked,
    cuts.Scaled,
    cuts.IndexedByAValue,
    cuts.ArrayOfAWeight,
    cuts.ArrayForAWhile,
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", PLANNED)
def test_a_loop_has_eagers_bits_and_runs_by_a_plan(kind: type[Loop], device: str) -> None:
    session = compared(kind, device)
    assert session.planned_steps == STEPS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", CUT)
def test_a_step_with_values_in_its_middle_runs_by_plans_of_its_parts(
    kind: type[Loop], device: str
) -> None:
    session = compared(kind, device)
    assert session.planned_steps >= STEPS  # of twice as many


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [loops.Checkpointed, loops.Asking, loops.Refilled])
def test_a_loop_has_eagers_bits_and_some_of_its_steps_run_by_plans(
    kind: type[Loop], device: str
) -> None:
    assert compared(kind, device).planned_steps > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_raises_leaves_what_eager_leaves(device: str) -> None:
    assert compared(loops.Failing, device).planned_steps > 0


@pytest.mark.parametrize("device", DEVICES)
def test_what_crosses_a_cut_is_within_the_budget(device: str) -> None:
    session = compared(cuts.Item, device, budget="70%")
    assert session.plan is not None
    assert session.plan.host_bytes > 0


def test_kernels_that_ask_for_gradients_are_told() -> None:
    assert compared(loops.RecurrentInTurns, "cpu").planned_steps == STEPS


class AlwaysAnother(Loop):
    """No step is like one before."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.batches = self.batches * 30

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wider = x.repeat(1, 1 + self.calls)
        return super().loss(wider[:, :16], y)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_never_repeats_is_planned_no_longer_and_says_so(device: str) -> None:
    with pytest.warns(RuntimeWarning, match="each of 32 steps in a row was another one"):
        session = compared(AlwaysAnother, device)
    assert session.planned_steps == 32


class Zeros(Loop):
    """A value that no plan can have: a tensor of zeros that has no memory."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().loss(x + torch._efficientzerotensor((8, 16)).clone(), y)


def test_what_is_not_planned_says_why_once_and_has_eagers_bits() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compared(Zeros, "cpu")
    said = [str(one.message) for one in told]
    assert len(said) == 1
    assert "zeros that has no memory" in said[0]


@pytest.mark.parametrize("device", DEVICES)
def test_weights_come_and_go_within_a_budget(device: str) -> None:
    session = compared(loops.Held, device, budget="70%")
    assert session.plan is not None
    assert session.plan.host_bytes > 0


@pytest.mark.parametrize("device", DEVICES)
def test_every_length_has_a_tape_and_a_plan(device: str) -> None:
    session = compared(loops.Lengths, device)
    assert session.planned_steps == 3 * STEPS


@pytest.mark.parametrize("budget", [None, "100%"])
def test_an_error_of_a_late_kernel_may_not_be_caught_within_the_step(budget: str | None) -> None:
    net = nn.Embedding(4, 4)
    before = net.weight.detach().clone()
    with LiveSession(net, budget=budget, costs=Costs()) as session:
        caught = pytest.raises(StepError, match="which the step's own code has caught")
        with caught, session.step():
            with pytest.raises(IndexError):
                net(torch.tensor([1, 9])).sum().item()
            with torch.no_grad():
                net.weight.add_(1)
        with session.step(), torch.no_grad():
            net.weight.mul_(2)
    assert torch.equal(net.weight, 2 * before)


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


class TakesItsOwn(Loop):
    """Its first operation is given a tensor from outside, and in every other step one of the same
    geometry that the step has made, which later operations know, too."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.outside = torch.tensor(3.0, device=device)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x, y)
        given = (self.outside if self.calls % 2 else loss).detach()
        return loss * given.clone() + (loss.detach() + 1).sqrt()


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_from_outside_is_none_that_the_step_has_made(device: str) -> None:
    assert compared(TakesItsOwn, device).planned_steps == STEPS


class Resumed(Loop):
    """Its module and states come from a file. `array`: numpy has one of the states."""

    array: Any = None

    def __init__(self, device: str, watched: bool = False) -> None:
        super().__init__(device)
        for x, y in self.batches[:2]:
            self.step(x, y)
        file = io.BytesIO()
        torch.save((self.net, self.optimizer.state_dict()), file)
        file.seek(0)
        self.net, states = torch.load(file, weights_only=False)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.optimizer.load_state_dict(states)
        if watched:
            self.array = next(iter(self.optimizer.state.values()))["exp_avg"].numpy()

    def between(self) -> None:
        if self.array is not None:
            self.seen.append(torch.tensor(self.array.copy()))


@pytest.mark.parametrize("watched", [False, True])
def test_weights_and_states_from_a_file_are_planned_unless_numpy_has_them(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    run_part = PlannedTapes.run

    def counted(self: PlannedTapes, tape: Any, *held: Any) -> None:
        parts.append(tape.begin)
        run_part(self, tape, *held)

    monkeypatch.setattr(PlannedTapes, "run", counted)
    compared(functools.partial(Resumed, watched=watched), "cpu")
    assert (len(parts) > STEPS) is watched


@pytest.fixture
def open_session() -> Iterator[LiveSession]:
    with LiveSession(nn.Linear(2, 2)) as session:
        yield session


def test_a_session_that_only_plans_leaves_no_states_without_numbers() -> None:
    known, loop = run(Loop("cpu"), None), Loop("cpu")
    session = LiveSession(loop.net, loop.optimizer, budget="100%", runs=False)
    with session, session.step():
        loop.step(*loop.batches[0])
    assert session.plan is not None
    loop.seen, loop.calls = [], 0
    loop.net.norm.num_batches_tracked.zero_()  # a number of the host's, as what Python counts
    assert run(loop, None) == known


def test_a_state_that_was_looked_at_may_be_dropped() -> None:
    loop = Loop("cpu")
    with LiveSession(loop.net, loop.optimizer, budget="100%", costs=Costs()) as session:
        for x, y in loop.batches:
            with session.step():
                loop.step(x, y)
            assert all(
                v.isfinite().all() for s in loop.optimizer.state.values() for v in s.values()
            )
            loop.optimizer.state.clear()
        assert session.planned_steps == STEPS


def test_ctrl_c_while_a_part_runs_waits_for_it_and_ends_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[int] = []
    run_part = PlannedTapes.run

    def interrupted(self: PlannedTapes, tape: Any, *held: Any) -> None:
        parts.append(tape.begin)
        if len(parts) == 13:  # the first part of the fourth step
            signal.raise_signal(signal.SIGINT)
            threading.Event().wait(0.1)
        run_part(self, tape, *held)
        parts.append(-1)

    monkeypatch.setattr(PlannedTapes, "run", interrupted)
    plain, loop = cuts.Item("cpu"), cuts.Item("cpu")
    torch.manual_seed(0)
    for x, y in plain.batches[:3]:
        plain.step(x, y)
    torch.manual_seed(0)
    with (
        pytest.raises(KeyboardInterrupt),
        LiveSession(loop.net, loop.optimizer, budget="100%", costs=Costs()) as session,
    ):
        for x, y in loop.batches:
            with session.step():
                loop.step(x, y)
    assert parts[-1] == -1
    for one, other in zip(loop.net.parameters(), plain.net.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_session_within_a_session_is_refused(open_session: LiveSession) -> None:
    with pytest.raises(RuntimeError, match="a live session is open already"):
        LiveSession(nn.Linear(2, 2)).__enter__()


def test_a_step_within_a_step_is_refused(open_session: LiveSession) -> None:
    refused = pytest.raises(RuntimeError, match="a step begins within another one")
    with open_session.step(), refused, open_session.step():
        pass


def test_without_a_compiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.live.core.LIBRARY.result", lambda: "no C++ compiler was found")
    with pytest.raises(OffloadError, match="cannot run on shadows here: no C\\+\\+ compiler"):
        LiveSession(nn.Linear(2, 2))
