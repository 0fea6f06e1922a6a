"""Runs the Python of every step on shadows, and the kernels of the step by a plan.

with LiveSession(module, optimizer, budget="60%") as session:
    for batch in batches:
        with session.step():
            loss = module(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()

first run of a tape    shadows; it is recorded on stand-ins    csrc/recording.h
later runs             shadows; it is compared with the tape   csrc/matching.h
the step's end         its plan runs                           planned_tapes.py
the next step          the kernels still run, on a CPU too     flights.py
a value is needed      a cut: the part before it runs by a plan of its own
another operation      the rest is recorded as another tape

Without a budget a tape runs as it was issued, as without us, until it comes for the second time.
"""

import logging
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from offload.errors import CaptureError, StepError
from offload.graph.costs import Costs
from offload.live.core import load_core
from offload.live.entrances import ENTRANCES
from offload.live.flights import Flights, land_before_forks
from offload.live.kernel_thread import KernelThread
from offload.live.placing import device_of, placed
from offload.live.planned_tapes import PlannedRun, PlannedTapes
from offload.live.runner_plans import PlainPlanner, RunnerPlans, TapePlanner, UnrunPlans
from offload.live.weights import LiveWeights
from offload.plans.plan import Budget, Plan
from offload.program.frames import say_frame, user_frame

log = logging.getLogger(__name__)

MOST_NEW = 32
"""If so many steps in a row were each a new one, the next new ones are not planned."""
MOST_TAPES = 64
"""If there are more, all are forgotten."""


_CAUGHT = (
    "a kernel of this step raised an error, which the step's own code has caught. Kernels run later"
    " than they are issued, so what came after it in the step has not run: let it end the step"
)


class LiveSession:
    """A context manager around a loop. At its end every tensor has memory of its own. Every thread
    may have one."""

    def __init__(
        self,
        module: torch.nn.Module,
        *optimizers: torch.optim.Optimizer,
        budget: Budget = None,
        device: torch.device | str = "cpu",
        costs: Costs | None = None,
        planner: TapePlanner | None = None,
        runs: bool = True,
        overlaps: bool = False,
    ) -> None:
        """`budget`: as `offload.plan` takes it, or a share such as 60% of what the largest part of
        a step needs without one. `device`: where the steps run; a module that is elsewhere stays
        there with the optimizers' states, and looks as if it were on the device. `planner`: makes
        and runs the plans; one with these `costs` if not given. `runs`: whether plans run; without
        it every step is only planned, what it makes is zeros, and states that it gives to the
        optimizers are dropped at the end. `overlaps`: whether the kernels of a step may run in
        another thread while Python is at the next one. On a GPU they do so by themselves."""
        self._core = load_core()
        self._device = device_of(device, (), ())
        self._weights = LiveWeights(self._core, module, optimizers, self._device)
        self._optimizers = optimizers
        groups = (group["params"] for each in optimizers for group in each.param_groups)
        self.parameters = tuple(dict.fromkeys((*module.parameters(), *chain(*groups))))
        self._plans_at_once = budget is not None or not runs
        self._placed = partial(placed, self._core, module, optimizers, self._device)
        self._runs = runs
        kind = RunnerPlans if runs else UnrunPlans
        self.plans = kind(planner or PlainPlanner(costs), budget)
        self._tapes = PlannedTapes(self._core, self._weights, self.plans, self._device)
        self._open, self._tensors = ExitStack(), ExitStack()
        self._unplanned: set[tuple[int, int]] = set()
        self._own: Any = None
        """What the core knows of it, while it is open."""
        self._thread: KernelThread | None = None
        may_fly = overlaps and runs and self._device.type == "cpu"
        self.flights = Flights(self._core, self._kernel_thread, may_fly)
        self._told: set[str] = set()
        self._new_in_a_row = 0
        self._tapes_known = 0
        self.name = ""
        """What the latest step is called."""
        self.planned_steps = 0
        """How many steps ran by a plan."""

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest part."""
        return self.plans.plan

    def __enter__(self) -> "LiveSession":
        where = self._device.type
        waits = self._run_part, self.flights.look
        self._own = self._core.open(where, self._plans_at_once, _line, *waits)
        land_before_forks(self._core)
        self._open.callback(self._own.close)
        self._tapes.begin()
        self._open.enter_context(ENTRANCES.watched(self._core))
        self._tensors.callback(self._core.release_all)
        with torch.inference_mode(False):
            self._weights.know(self._tensors.enter_context(self._placed()))
        self._tensors.callback(self._forget_lost)
        if not self._runs:
            states = [{p: dict(own) for p, own in one.state.items()} for one in self._optimizers]
            self._tensors.callback(self._put_back, states)
        self._tensors.callback(self._close_tapes)
        return self

    def __exit__(self, *error: object) -> None:
        self._own.check_here()
        try:
            with closing(self._tensors):
                self.flights.land()
        finally:
            self._open.close()

    def _forget_lost(self) -> None:
        """Drop gradients without bytes, and states that a step has made which did not run: nobody
        could copy or move them."""
        for parameter in self.parameters:
            if parameter.grad is not None and self._core.is_lost(parameter.grad):
                parameter.grad = None
        for optimizer in self._optimizers:
            for parameter, state in [*optimizer.state.items()]:
                tensors = [one for one in state.values() if isinstance(one, torch.Tensor)]
                if any(map(self._core.is_lost, tensors)):
                    del optimizer.state[parameter]

    def _put_back(self, states: list[dict[Any, Any]]) -> None:
        """Drop states whose numbers no kernel has made."""
        for optimizer, before in zip(self._optimizers, states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(before)

    def abandon(self) -> None:
        """Leave without touching the device, which is lost. Nothing on it can be read."""
        self._tensors.pop_all()
        if self._core.current() is not None:
            self._core.end()
        with self.unseen():
            self.plans.abandon()
        self._core.abandon_all()
        self._open.close()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Within it, operations run as without the session. They must not touch its tensors. What
        is made stays, so it is no tensor of the user's inference mode."""
        was_on = self._core.set_key(False)
        try:
            with torch.inference_mode(False):
                yield
        finally:
            self._core.set_key(was_on)

    def _close_tapes(self) -> None:
        with self.unseen():
            self._core.hide_shown()
            self._tapes.close()

    def home_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where its bytes are until the next step, on whatever device: they can be read
        and written there, and are copied nowhere."""
        self.flights.land()
        return self._core.home_of(tensor)

    @contextmanager
    def step(self, name: str = "step", *, keeps: Collection[torch.Tensor] = ()) -> Iterator[None]:
        """One step. Steps of another name have tapes of their own. `keeps`: as of `end`."""
        self.begin(name)
        try:
            yield
        except BaseException:
            self.end_as_issued()  # what came before the error has happened, as in eager
            raise
        self.end(keeps=keeps)

    def begin(self, name: str = "step") -> None:
        """Begin a step, which `end` or `end_as_issued` ends."""
        if self._tapes_known > MOST_TAPES:
            self.flights.land()
            self._forget_tapes()
        self._core.begin(name)
        self.name = name

    def _forget_tapes(self) -> None:
        self._core.forget_tapes()
        self._tapes.forget()
        self._unplanned.clear()
        self._tapes_known = 0

    @property
    def draws(self) -> bool:
        """Whether a step has drawn from the generators that all threads share."""
        return self._own.draws

    def let_draw(self, allowed: bool) -> None:
        """Whether the next steps may draw from them. Where they may not, a draw raises."""
        self._own.may_draw = allowed

    def show_weights(self, *, copies: bool = False) -> None:
        """Let every thread read and write the weights, until the next step begins. Those whose
        bytes are on another device are shown as `copies`, or not at all."""
        self.flights.land()
        self._core.show_all(copies)

    @property
    def is_backward(self) -> bool:
        """Whether autograd calls this, as a checkpoint's second forward pass is called."""
        return self._core.is_backward()

    @property
    def has_backward(self) -> bool:
        """Whether the step that runs has gone backward."""
        return self._core.current().has_backward

    def end(self, *, keeps: Collection[torch.Tensor] | None = ()) -> None:
        """End a step. `keeps`: the parameters whose gradients are needed after it; None: all of
        them. Those of all others have no bytes from now on, which they would cost."""
        tape = self._core.end()
        try:
            self.flights.land(in_time=True)
        except BaseException:
            self._core.nothing_pending()
            tape.over(set(), set())
            raise
        if tape.failed:
            tape.over(set(), set())
            raise StepError(_CAUGHT)
        gradients = self._gradients(tape, self.parameters)
        stay = {*gradients} if keeps is None else self._gradients(tape, keeps)
        gradients -= stay
        if tape.recorded:
            stay |= tape.slots_of(self._weights.states())  # those that it has made
        flies = False
        try:
            flies = self._flies(tape, gradients, stay)
            if flies:
                self.planned_steps += 1
            elif not tape.by_plan or not self._may_plan(tape):
                tape.run_as_issued()
            elif not tape.waits or self._run(tape, {*tape.held} - gradients, stay):
                self.planned_steps += 1
            else:
                tape.run_as_issued()
        finally:
            if not flies:
                tape.over(gradients if tape.by_plan else set(), stay)
            self._new_in_a_row = self._new_in_a_row + 1 if tape.recorded else 0
            self._tapes_known += tape.recorded

    def _flies(self, tape: Any, gradients: set[int], stay: set[int]) -> bool:
        """Let the kernels of a step run on while Python goes on, if no part of it had to be waited
        for. False: they have not begun."""
        if tape.recorded or tape.begin or not tape.by_plan or not tape.waits:
            return False

        def ready() -> PlannedRun | None:
            with self.unseen():
                return self._tapes.ready(tape, {*tape.held} - gradients, copies=True)

        return self.flights.begin(ready, gradients, stay)

    def _kernel_thread(self) -> KernelThread:
        if self._thread is None:
            thread = KernelThread(self._core, self._own.serve)
            self._thread = self._open.enter_context(thread)
        return self._thread

    def _may_plan(self, tape: Any) -> bool:
        """Whether it is worth a plan: it was here before, or there is a budget to keep."""
        if not tape.recorded:
            return True
        if self._plans_at_once and self._new_in_a_row >= MOST_NEW:
            self._tell(f"each of {MOST_NEW} steps in a row was another one")
            return False
        return self._plans_at_once

    def end_as_issued(self) -> None:
        """End a step that was interrupted: what was issued before has happened, as in eager."""
        tape = self._core.end()
        try:
            tape.run_as_issued()
        finally:
            tape.over(set(), set())

    def _run_part(self, tape: Any) -> bool:
        """Run what was issued before a cut by a plan. False: it has none."""
        if not self._may_plan(tape):
            return False
        everything = {*tape.held}
        return self._kernel_thread().run(partial(self._run, tape, everything, everything))

    def _run(self, tape: Any, held: set[int], at_home: set[int]) -> bool:
        """Run what was issued since the last cut by a plan. False: it has none."""
        place = tape.begin, tape.leaf
        if place in self._unplanned:
            return False
        try:
            with self.unseen():
                self._tapes.run(tape, held, at_home)
        except CaptureError as error:
            self._unplanned.add(place)
            self._tell(str(error))
            return False
        return True

    def _gradients(self, tape: Any, parameters: Iterable[torch.Tensor]) -> set[int]:
        """The slots of their gradients."""
        found = (parameter.grad for parameter in parameters)
        return tape.slots_of([gradient for gradient in found if gradient is not None])

    def _tell(self, why: str) -> None:
        """Say once why a step has no plan."""
        if why not in self._told:
            self._told.add(why)
            text = f"a step runs as it is issued, without a plan and a budget: {why}"
            log.info("step %s has no plan: %s", self.name, why)
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _line() -> str:
    """The user's line that issues an operation."""
    return say_frame(user_frame(), short=True)
