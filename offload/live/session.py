"""Runs the Python of every step on shadows, and the kernels of the step by a plan.

with LiveSession(module, optimizer, budget="60%") as session:
    for batch in batches:
        with session.step():
            loss = module(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()

first run of a tape    as without us, and recorded             csrc/recording.h
later runs             shadows; at the step's end the plan     csrc/matching.h, planned_tapes.py
a value is needed      a cut: the part before it runs, once as issued, then by a plan of its own
another operation      what was issued runs, and the rest is recorded as another tape
"""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from offload.errors import BudgetTooSmall, CaptureError
from offload.graph.costs import Costs
from offload.live.core import load_core
from offload.live.entrances import watched
from offload.live.planned_tapes import PlannedTapes
from offload.live.weights import LiveWeights
from offload.plans.plan import Budget, Plan
from offload.program.frames import say_frame, user_frame


class LiveSession:
    """A context manager around a loop. At its end every tensor has memory of its own."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        budget: Budget = None,
        device: torch.device | str = "cpu",
        costs: Costs | None = None,
    ) -> None:
        """`budget`: as `offload.plan` takes it, or a share such as 60% of what the first planned
        step needs without one. `device`: where the module is."""
        self._core = load_core()
        self._parameters = tuple(module.parameters())
        self._device = torch.device(device)
        weights = LiveWeights(self._core, module, optimizer, self._device)
        self._tapes = PlannedTapes(self._core, weights, budget, self._device, costs)
        self._open = ExitStack()
        self._unplanned: set[tuple[int, int]] = set()
        self._clean: ThreadPoolExecutor | None = None
        """A thread without any mode of the user's: parts run in the middle of their code."""
        self._told: set[str] = set()
        self.planned_steps = 0
        """How many steps ran by a plan."""

    @property
    def plan(self) -> Plan | None:
        """The plan of the first step that has one."""
        return self._tapes.plan

    def __enter__(self) -> "LiveSession":
        self._core.enable(True, self._device.type, _line, self._run_part)
        self._open.callback(self._core.enable, False, self._device.type, None, None)
        self._clean = self._open.enter_context(ThreadPoolExecutor(1, "live-part"))
        self._open.enter_context(watched(self._core))
        self._open.callback(self._core.release_all)
        self._open.callback(self._close_tapes)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Within it, operations run as without the session. They must not touch its tensors."""
        was_on = self._core.set_key(False)
        try:
            yield
        finally:
            self._core.set_key(was_on)

    def _close_tapes(self) -> None:
        with self.unseen():
            self._core.hide_shown()
            self._tapes.close()

    @contextmanager
    def step(self, name: str = "step") -> Iterator[None]:
        """One step. Steps of another name have tapes of their own."""
        self._core.begin(name)
        try:
            yield
        except BaseException:
            self._end(by_plan=False)  # what came before the error has happened, as in eager
            raise
        self._end(by_plan=True)

    def _end(self, *, by_plan: bool) -> None:
        tape = self._core.end()
        gradients: set[int] = set()
        try:
            if not (by_plan and tape.by_plan):
                tape.run_as_issued()
                return
            gradients = self._gradients(tape)
            if not tape.waits or self._run(tape, {*tape.held} - gradients, at_cut=False):
                self.planned_steps += 1
            else:
                tape.run_as_issued()
        finally:
            tape.over(gradients if tape.by_plan else set())

    def _run_part(self, tape: Any) -> bool:
        """Run what was issued before a cut by a plan. False: it has none."""
        assert self._clean is not None
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def run() -> bool:
            with torch.cuda.stream(stream):
                return self._run(tape, {*tape.held}, at_cut=True)

        return self._clean.submit(run).result()

    def _run(self, tape: Any, held: set[int], *, at_cut: bool) -> bool:
        """Run what was issued since the last cut by a plan. False: it has none."""
        place = tape.begin, tape.leaf
        if place in self._unplanned:
            return False
        try:
            with self.unseen():
                self._tapes.run(tape, held, at_cut=at_cut)
        except (CaptureError, BudgetTooSmall) as error:
            if self._tapes.plan is None and isinstance(error, BudgetTooSmall):
                raise
            self._unplanned.add(place)
            self._tell(str(error))
            return False
        return True

    def _gradients(self, tape: Any) -> set[int]:
        """The slots of gradients. They are not kept after a planned step: they would cost their
        bytes."""
        found = (parameter.grad for parameter in self._parameters)
        return {tape.slot_of(grad) for grad in found if grad is not None} - {-1}

    def _tell(self, why: str) -> None:
        """Say once why a step has no plan."""
        if why not in self._told:
            self._told.add(why)
            text = f"a step runs as it is issued, without a plan and a budget: {why}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _line() -> str:
    """The user's line that issues an operation."""
    return say_frame(user_frame(), short=True)
