"""The live session of a run, and the step that is open in it.

first step   opens the session        later steps   the same one        close   ends it

A thread has at most one open session. When another run of the same thread opens one, this one is
closed between two of its steps, and its next step opens it again.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch.optim import Optimizer

from offload import DeviceLost, OffloadError, Plan
from offload.gate import Gate
from offload.live.session import LiveSession, OnPart
from offload.running.drivers.device_loss import device_lost
from trainers.steps.interrupt import DelayedInterrupt


class _ThreadSession(threading.local):
    """The session that is open in a thread."""

    def __init__(self) -> None:
        self.session: StepSession | None = None


_THREAD = _ThreadSession()


class StepSession:
    """Opens and closes the live session of a run, and begins and ends its steps."""

    def __init__(self, gate: Gate | None = None) -> None:
        """`gate`: it is held while the session opens and closes, because guests may use the
        device."""
        self.live: LiveSession | None = None
        self.is_in_step = False
        self.has_lost_results = False
        """Whether the kernels of the latest step did not run, so that its results have no bytes."""
        self.interrupt = DelayedInterrupt()
        self.lost: DeviceLost | None = None
        """The error that says that the device is lost, and the weights on it with it."""
        self._on_part: OnPart | None = None
        self._gate = gate
        self._plan: Plan | None = None
        self._closed_steps = 0
        """How many steps ran by plans in sessions that are closed."""
        self._optimizers: tuple[int, ...] = ()
        self._restorable: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._step = ExitStack()
        """While a step is open, Ctrl-C waits for its end."""

    # ---- what ran --------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest part of a step; None before there is one."""
        self._plan = (self.live.plan if self.live is not None else None) or self._plan
        return self._plan

    @property
    def planned_steps(self) -> int:
        """How many steps ran by plans, in all their parts."""
        return self._closed_steps + (self.live.planned_steps if self.live is not None else 0)

    def reset(self) -> None:
        """Forget the plan, the counts and the lost device of an earlier run."""
        self.lost, self._plan, self._closed_steps = None, None, 0
        self.has_lost_results = False

    # ---- the session -----------------------------------------------------------------------------

    def open(
        self, create: Callable[[], LiveSession], optimizers: Iterable[Optimizer]
    ) -> LiveSession:
        """Return the live session over these optimizers. `create` makes it if none is open."""
        key = tuple(map(id, optimizers))
        if self.live is not None and self._optimizers == key:
            return self.live
        self.close()
        if _THREAD.session is not None:
            _THREAD.session.close_between_steps()
        self.live, self._optimizers = create().__enter__(), key
        self.live.hooks.on_part = self._on_part
        _THREAD.session = self
        return self.live

    def watch_parts(self, on_part: OnPart | None) -> None:
        """Have the next steps show their parts before kernels run; None: no longer."""
        self._on_part = on_part
        if self.live is not None:
            self.live.hooks.on_part = on_part

    def close_between_steps(self) -> None:
        """Close the session because another run of this thread needs to open one."""
        if self.is_in_step:
            raise OffloadError(
                "a trainer runs within a step of another one, whose steps are planned: run it"
                " between two steps, or in another thread"
            )
        self.close()

    def close(self) -> None:
        """Give all tensors memory of their own again. It is safe to call again."""
        if self.live is None:
            return
        live = self.live
        _THREAD.session = None
        live.kernels.wait_for_kernels()
        self._plan, self._closed_steps = self.plan, self.planned_steps
        self.live = None
        was_in_step, self.is_in_step = self.is_in_step, False
        self.has_lost_results |= live.kernels.failed
        if self.lost is not None:
            self._step.close()
            live.abandon()
            return
        with self._step, self._gate.hold() if self._gate else nullcontext():
            if was_in_step:
                live.end_as_issued()
            live.__exit__(None, None, None)
        if live.plans.refused:  # nothing of the step has happened: the module may train anew
            for tensor, before in self._restorable:
                tensor.data.copy_(before)

    # ---- a step ----------------------------------------------------------------------------------

    def begin(self, name: str, restorable: Sequence[torch.Tensor] = ()) -> None:
        """Begin a step. `restorable`: operations on these tensors run at once, so they get their
        present values back if the step has no plan."""
        assert self.live is not None
        self._restorable = [(tensor, tensor.clone()) for tensor in restorable]
        self.live.begin(name)
        self._step.enter_context(self.interrupt.delay())
        self.is_in_step = True

    def end(self, keeps: Collection[torch.Tensor] | None = None) -> None:
        """End the step if one is open. `keeps`: the parameters whose gradients are kept; None: all
        of them."""
        if not self.is_in_step:
            return
        assert self.live is not None
        self.is_in_step, self.has_lost_results = False, True
        with self._step:
            self.live.end(keeps=keeps)
        self.has_lost_results = False
        self._restorable = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run the block as a step, all of whose gradients are kept."""
        self.begin(name)
        try:
            yield
        except BaseException:
            self._end_as_issued()
            raise
        self.end()

    def _end_as_issued(self) -> None:
        """End a step that was interrupted: its operations so far have happened, as in eager."""
        assert self.live is not None
        self.is_in_step = False
        with self._step:
            self.live.end_as_issued()

    # ---- a lost device ---------------------------------------------------------------------------

    @contextmanager
    def watch_devices(self, *devices: torch.device) -> Iterator[None]:
        """Raise `DeviceLost` in place of any error of this block that says so, and remember it."""
        try:
            yield
        except Exception as error:
            self.lost = self.lost or device_lost(error, *devices)
            failed = self.live if self.lost is None else None
            if failed is not None and (refusal := failed.explain_failure(error)) is not None:
                raise refusal from error
            if self.lost is None or self.lost is error:
                raise
            raise self.lost from error

    def check_not_lost(self) -> None:
        """Raise `DeviceLost` if the device is lost."""
        if self.lost is not None:
            raise self.lost
