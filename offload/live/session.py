"""Runs the Python of every step on shadows, and the kernels of the step by a plan.

with LiveSession(module, optimizer, budget="60%") as session:
    for batch in batches:
        with session.step():
            loss = module(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()

first run of a tape    shadows; it is recorded on stand-ins    csrc/recording.h
later runs             shadows; it is compared with the tape   csrc/matching.h
the step's end         its plan runs                           planned_tapes.py
the next step          the kernels still run, on a CPU too     pending_step.py
a value is needed      a cut: the part before it runs by a plan of its own
another operation      the rest is recorded as another tape

Without a budget a tape runs as it was issued, as without us, until it comes for the second time.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from offload.errors import CaptureError, MemoryTooSmall, StepError
from offload.graph.costs import Costs
from offload.graph.taskgraph import TaskGraph
from offload.live.core import load_core
from offload.live.entrances import ENTRANCES
from offload.live.issued_needs import check_machine, graph_as_issued, refuse_on_device
from offload.live.pending_step import KernelThread, wait_before_forks
from offload.live.placing import device_of
from offload.live.plan_policy import PlanPolicy
from offload.live.planned_tapes import PlannedRun, PlannedTapes, list_splits
from offload.live.runner_plans import PlainPlanner, RunnerPlans, TapePlanner, UnrunPlans
from offload.live.weights import LiveWeights
from offload.plans.plan import Budget, Plan
from offload.program.frames import format_frame, user_frame

_CAUGHT = (
    "a kernel of this step raised an error, which the step's own code has caught. Kernels run later"
    " than they are issued, so what came after it in the step has not run: let it end the step"
)


OnPart = Callable[["LiveSession", Any, set[int]], None]
"""It gets a session, a tape whose kernels are about to run, and the slots held after them."""


def _user_line() -> str:
    """The user's line that issues an operation."""
    return format_frame(user_frame(), short=True)


@dataclass(slots=True)
class SessionHooks:
    """What a session calls. `perfect-step` sets them."""

    on_part: OnPart | None = None
    """It is called with each part of a step before its kernels run."""
    user_line: Callable[[], str] = _user_line
    """Returns the line that issues the present operation. It is read when the session opens."""


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
        devices: int = 1,
    ) -> None:
        """`budget`: as `offload.plan` takes it, or a share such as 60% of what the largest part of
        a step needs without one. `device`: where the steps run; a module that is elsewhere stays
        there with the optimizers' states, and looks as if it were on the device. `planner`: makes
        and runs the plans; one with these `costs` if not given. `runs`: whether plans run; without
        it every step is only planned, what it makes is zeros, and states that it gives to the
        optimizers are dropped at the end. `overlaps`: whether the kernels of a step may run in
        another thread while Python is at the next one. On a GPU they do so by themselves.
        `devices`: of so many devices from `device` on, if no planner is given; on the CPU each of
        them is a part of its memory."""
        self._core = load_core()
        self.weights = LiveWeights(self._core, module, optimizers, device_of(device, (), ()))
        kind = RunnerPlans if runs else UnrunPlans
        self.plans = kind(planner or PlainPlanner(costs, devices), budget)
        self.tapes = PlannedTapes(self._core, self.weights, self.plans)
        self._policy = PlanPolicy(plans_first_steps=budget is not None or not runs)
        self._open, self._tensors = ExitStack(), ExitStack()
        self._handle: Any = None
        """The core's part of the session, while it is open."""
        may_overlap = overlaps and runs and self.weights.device.type == "cpu"
        self.kernels = KernelThread(self._core, may_overlap)
        self.name = ""
        """The name of the latest step."""
        self.hooks = SessionHooks()
        self.planned_steps = 0
        """How many steps ran by a plan."""

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest part."""
        return self.plans.plan

    def __enter__(self) -> Self:
        device = self.weights.device.type
        calls = self._run_part, self.kernels.wait_early
        self._handle = self._core.open(
            device, self._policy.plans_first_steps, self.hooks.user_line, *calls
        )
        wait_before_forks(self._core)
        self._open.callback(self._handle.close)
        with ExitStack() as after_an_error:
            after_an_error.callback(self._open.close)
            after_an_error.callback(self._tensors.close)
            self._take_over()
            after_an_error.pop_all()
        return self

    def _take_over(self) -> None:
        self.kernels.open(self._handle.serve)
        self.tapes.begin()
        self._watch_entrances()
        self._tensors.callback(self._core.release_all)
        with torch.inference_mode(False):
            self._tensors.enter_context(self.weights.place_tensors())
        self._tensors.callback(self.weights.drop_lost)
        if isinstance(self.plans, UnrunPlans):
            self._tensors.callback(self.weights.put_states_back, self.weights.copy_states())
        self._tensors.callback(self._close_tapes)

    def _watch_entrances(self) -> None:
        self._open.enter_context(ENTRANCES.watch(self._core))
        self._open.callback(self.kernels.close)

    def __exit__(self, *error: object) -> None:
        self._handle.check_here()
        try:
            with closing(self._tensors):
                self.kernels.wait()
        finally:
            self._open.close()

    def abandon(self) -> None:
        """Leave without touching the device, which is lost. Nothing on it can be read."""
        self._tensors.pop_all()
        if self._core.current() is not None:
            self._core.end()
        with self.suspended():
            self.plans.abandon()
        self._core.abandon_all()
        self._open.close()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within it, operations run as without the session. They must not touch its tensors. What
        is made stays, so it is no tensor of the user's inference mode."""
        was_on = self._core.set_key(False)
        try:
            with torch.inference_mode(False):
                yield
        finally:
            self._core.set_key(was_on)

    def _close_tapes(self) -> None:
        with self.suspended():
            self._core.hide_shown()
            self.tapes.close()

    def home_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where its bytes are until the next step, on whatever device: they can be read
        and written there, and are copied nowhere."""
        self.kernels.wait()
        return self._core.home_of(tensor)

    @contextmanager
    def step(self, name: str = "step", *, keeps: Collection[torch.Tensor] = ()) -> Iterator[None]:
        """One step. Steps of another name have tapes of their own. `keeps`: as of `end`."""
        self.begin(name)
        try:
            yield
        except BaseException as error:
            refusal = self.explain_failure(error)
            self.end_as_issued()  # what came before the error has happened, as in eager
            if refusal is not None:
                raise refusal from error
            raise
        self.end(keeps=keeps)

    def explain_failure(self, error: object, tape: Any = None) -> MemoryTooSmall | None:
        """What a step needs of its device, if it has run as it was issued and there was too little
        memory; None for other errors. `tape`: what has ended; by default the present step, of which
        only the beginning is known."""
        part = tape is None
        tape = self._core.current() if part else tape
        if not isinstance(error, torch.OutOfMemoryError) or tape is None:
            return None
        if self._policy.plans_first_steps:
            return None  # there is a budget
        with suppress(CaptureError):
            return refuse_on_device(
                self._graph_of(tape), self.weights.device, list_splits(), part=part
            )

    def _graph_of(self, tape: Any) -> TaskGraph:
        with self.suspended():
            return graph_as_issued(self._core, tape, self.weights)

    def _check_machine(self, tape: Any) -> None:
        """Raise `MemoryTooSmall` before a new step runs that this machine cannot hold."""
        if tape.recorded and self.weights.device.type == "cpu":
            try:
                with suppress(CaptureError):  # what cannot be planned cannot be counted
                    check_machine(tape, partial(self._graph_of, tape))
            except MemoryTooSmall:
                self._core.clear_pending()
                raise

    def _run_as_issued(self, tape: Any) -> None:
        try:
            tape.run_as_issued()
        except torch.OutOfMemoryError as error:
            if (refusal := self.explain_failure(error, tape)) is None:
                raise
            raise refusal from error

    def begin(self, name: str = "step") -> None:
        """Begin a step, which `end` or `end_as_issued` ends."""
        if self._policy.has_too_many_tapes:
            self.kernels.wait()
            self._core.forget_tapes()
            self.tapes.forget()
            self._policy.forget()
        self._core.begin(name)
        self.name = name

    @property
    def draws(self) -> bool:
        """Whether a step has drawn from the generators that all threads share."""
        return self._handle.draws

    def let_draw(self, allowed: bool) -> None:
        """Whether the next steps may draw from them. Where they may not, a draw raises."""
        self._handle.may_draw = allowed

    def show_weights(self, *, copies: bool = False) -> None:
        """Let every thread read and write the weights, until the next step begins. Those whose
        bytes are on another device are shown as `copies`, or not at all."""
        self.kernels.wait()
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
            self.kernels.wait(at_step_end=True)
        except BaseException:
            self._core.clear_pending()
            tape.finish(set(), set())
            raise
        if tape.failed:
            tape.finish(set(), set())
            raise StepError(_CAUGHT)
        gradients = _gradient_slots(tape, self.weights.parameters)
        stay = {*gradients} if keeps is None else _gradient_slots(tape, keeps)
        gradients -= stay
        if tape.recorded:
            stay |= tape.slots_of(self.weights.states())  # those that it has made
        is_pending = False
        try:
            self._show_part(tape, {*tape.held} - gradients)
            is_pending = self._submit(tape, gradients, stay)
            if is_pending:
                self.planned_steps += 1
            elif not tape.by_plan or not self._policy.may_plan(tape, self.name):
                self._check_machine(tape)
                self._run_as_issued(tape)
            elif not tape.waits or self._run(tape, {*tape.held} - gradients, stay):
                self.planned_steps += 1
            else:
                self._run_as_issued(tape)
        finally:
            if not is_pending:
                tape.finish(gradients if tape.by_plan else set(), stay)
            self._policy.count(tape)

    def _submit(self, tape: Any, gradients: set[int], stay: set[int]) -> bool:
        """Let the kernels of a step run on while Python goes on, if no part of it had to be waited
        for. False: they have not begun."""
        if tape.recorded or tape.begin or not tape.by_plan or not tape.waits:
            return False

        def prepare() -> PlannedRun | None:
            with self.suspended():
                return self.tapes.prepare(tape, {*tape.held} - gradients, copies=True)

        return self.kernels.submit(prepare, gradients, stay)

    def end_as_issued(self) -> None:
        """End a step that was interrupted: what was issued before has happened, as in eager."""
        tape = self._core.end()
        try:
            self._run_as_issued(tape)
        finally:
            tape.finish(set(), set())

    def _run_part(self, tape: Any) -> bool:
        """Run what was issued before a cut by a plan. False: it has none."""
        everything = {*tape.held}
        self._show_part(tape, everything)
        if not self._policy.may_plan(tape, self.name):
            return False
        return self.kernels.run(partial(self._run, tape, everything, everything))

    def _show_part(self, tape: Any, held: set[int]) -> None:
        if self.hooks.on_part is not None and tape.waits:
            with self.suspended():
                self.hooks.on_part(self, tape, held)

    def _run(self, tape: Any, held: set[int], at_home: set[int]) -> bool:
        """Run what was issued since the last cut by a plan. False: it has none."""
        if not self._policy.can_plan(tape):
            return False
        try:
            with self.suspended():
                self.tapes.run(tape, held, at_home)
        except CaptureError as error:
            self._policy.refuse(tape, self.name, str(error))
            return False
        return True


def _gradient_slots(tape: Any, parameters: Iterable[torch.Tensor]) -> set[int]:
    """The slots of the parameters' gradients."""
    gradients = (parameter.grad for parameter in parameters)
    return tape.slots_of([gradient for gradient in gradients if gradient is not None])
