"""Runs the Python of every step on shadows, and the kernels of the step by a plan.

    with LiveSession(module, optimizer, budget="60%") as session:
        for batch in batches:
            with session.step():
                loss = module(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()

    first run of a tape    as without us, and recorded             csrc/recording.h
    later runs             shadows; at the step's end the plan     csrc/matching.h, planned_tapes.py
    another operation      what was issued runs, and the rest is recorded as another tape

A step that needs a value in its middle runs as it is issued, without a plan, and says so once.
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from offload.errors import CaptureError
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
        weights = LiveWeights(self._core, module, optimizer)
        self._tapes = PlannedTapes(self._core, weights, budget, torch.device(device), costs)
        self._open = ExitStack()
        self._unplanned: set[int] = set()
        self._told: set[str] = set()
        self.planned_steps = 0
        """How many steps ran by a plan."""

    @property
    def plan(self) -> Plan | None:
        """The plan of the first step that has one."""
        return self._tapes.plan

    def __enter__(self) -> "LiveSession":
        self._core.enable(True, _line)
        self._open.callback(self._core.enable, False, None)
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
            self._tapes.close()

    @contextmanager
    def step(self, name: str = "step") -> Iterator[None]:
        """One step. Steps of another name have tapes of their own."""
        self._core.begin(name)
        try:
            yield
        except BaseException:
            if (tape := self._core.end()) is not None:
                tape.run_as_issued()  # what came before the error has happened, as in eager
            raise
        if (tape := self._core.end()) is not None:
            self._run(tape)
        elif not self._core.divergence() and (why := self._core.waited_for()):
            self._tell(why)

    def _run(self, tape: Any) -> None:
        if tape.leaf in self._unplanned:
            tape.run_as_issued()
            return
        try:
            with self.unseen():
                self._tapes.run(tape, self._kept(tape))
        except CaptureError as error:
            self._unplanned.add(tape.leaf)
            self._tell(str(error))
            tape.run_as_issued()
        else:
            self.planned_steps += 1

    def _kept(self, tape: Any) -> set[int]:
        """The slots that somebody holds after the step. Gradients are not kept: they would cost
        their bytes."""
        gradients = (parameter.grad for parameter in self._parameters)
        return {*tape.held} - {tape.slot_of(grad) for grad in gradients if grad is not None}

    def _tell(self, why: str) -> None:
        """Say once why a step has no plan."""
        if why not in self._told:
            self._told.add(why)
            text = f"a step runs as it is issued, without a plan and a budget: {why}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _line() -> str:
    """The user's line that issues an operation."""
    return say_frame(user_frame(), short=True)
