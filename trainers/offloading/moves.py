"""Moves a training to another budget or device: planned by the caller, made between two steps.

    any thread    | move_to(): plan ............ |     done.result()
    the training  | step | step | step | step    | the transfer | step there

Only the transfer delays the training. A move for which there is no room changes nothing.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_warn

from offload import BudgetTooSmall, DeviceLost, MemoryTooSmall, OffloadError, Plan
from offload.live.session import LiveSession
from offload.running.drivers.cuda import check_cuda
from offload.running.runner_memory import Migration
from trainers.offloading.run import StrategyRun
from trainers.steps.plan_request import PlanRequest
from trainers.steps.target import Target, accelerator_for, target_of

log = logging.getLogger(__name__)

UNCHANGED = "same"
"""The value of `budget` for a move that keeps the present budget."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingMove:
    """A move that waits for the next step."""

    budget: str | int | None
    target: Target | None
    """None: the present one."""
    devices: int | None = None
    """None: as many as at present."""
    planned_from: Plan | None = None
    """The plan whose graph was planned again; None if there was none at that time."""
    plan: Plan | None = None
    done: Future[Migration] = field(default_factory=Future)

    def applied_to(self, request: PlanRequest) -> PlanRequest:
        """Return the request of the run after this move. Another move may have come before."""
        budget = request.budget if self.budget == UNCHANGED else self.budget
        return replace(
            request,
            budget=budget,
            target=self.target or request.target,
            devices=self.devices or request.devices,
        )


class PendingMoves:
    """The moves of one run that wait, in the order of the calls."""

    def __init__(self, run: StrategyRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._waiting: list[PendingMove] = []

    # ---- any thread ------------------------------------------------------------------------------

    def add(
        self,
        budget: str | int | None,
        device: torch.device | str | None,
        devices: int | None,
        here: torch.device,
        plugin: Precision,
    ) -> Future[Migration]:
        """Plan a move and have it wait. `here`: the present device. `plugin`: what the rates of
        another device depend on."""
        if self._run.is_eager:
            raise OffloadError("this run trains eagerly, so it has no plan that could move")
        try:
            there = here if device is None else torch.device(device)
        except RuntimeError as error:
            raise OffloadError(f"move_to(device={device!r}): {error}") from None
        if devices is not None and devices < 1:
            raise OffloadError(f"move_to(devices={devices}): give 1 or more")
        if there == here and budget == UNCHANGED and devices in (None, self._run.request.devices):
            raise OffloadError(
                f"move_to() names no other place than the run has: give another budget, another"
                f" device than {here}, or another number of devices"
            )
        live = self._run.session.live
        planned_from = live.plan if live is not None else None
        if planned_from is None and self._run.session.plan is None:
            raise OffloadError(
                "move_to() comes before the first step, so there is no plan to move from: give the"
                " budget to the strategy, give the device to the Trainer, or call it from the"
                " second step on"
            )
        target = None if device is None else self._run.request.target
        if devices is not None and self._run.request.target.make_runner is not None:
            raise OffloadError("a fleet gives its jobs their devices: this job cannot choose them")
        if there != here:
            wished = replace(self._run.request, devices=devices or self._run.request.devices)
            target = wished.for_target(target_on(self._run, there), plugin).target
        elif devices is not None:
            self._run.request.target.check_devices(devices)
        move = PendingMove(budget, target, devices)
        request = move.applied_to(self._run.request)  # raises where the budget is none
        if live is not None and planned_from is not None:
            plan = self._planned(live, request)
            move = replace(move, planned_from=planned_from, plan=plan)
        move.done.set_running_or_notify_cancel()  # nobody can cancel it
        with self._lock:
            self._waiting.append(move)
        return move.done

    def _planned(self, live: LiveSession, request: PlanRequest) -> Plan:
        planner = self._run.planner_for(request)
        is_spread = request.devices != self._run.request.devices
        return live.plans.plan_in(request.budget, planner, places=is_spread)

    # ---- the training's thread, between two steps ------------------------------------------------

    def make_all(self, here: torch.device, relocate: Callable[[PlanRequest], Migration]) -> None:
        """Make the moves that wait. `relocate` has the run go on as one of another device."""
        session = self._run.session
        # After a move to another device the next one waits for a plan of its own.
        while self._waiting and session.live is not None and session.live.plan:
            move = self._pop()
            with (
                session.watch_devices(*self._run.devices),
                session.interrupt.delay(),
                self._report_failure(move),
            ):
                move.done.set_result(self._make(move, session.live, here, relocate))

    def _make(
        self,
        move: PendingMove,
        live: LiveSession,
        here: torch.device,
        relocate: Callable[[PlanRequest], Migration],
    ) -> Migration:
        live.kernels.wait()
        request, plan = move.applied_to(self._run.request), move.plan
        if plan is None or live.plan is not move.planned_from:
            plan = self._planned(live, request)
        if request.target.device != here or request.devices != self._run.request.devices:
            request.target.check_room(plan, live.plan if request.target.device == here else None)
            return relocate(request)
        migration = live.plans.move_to(request.budget, plan)
        log.info("the run goes on within budget %s", request.budget)
        self._run.replace_request(request)
        return migration

    def _pop(self) -> PendingMove:
        with self._lock:
            return self._waiting.pop(0)

    @contextmanager
    def _report_failure(self, move: PendingMove) -> Iterator[None]:
        """Give the error of this block to the caller of the move. If there was no room or no plan,
        the training goes on where it is. Any other error ends it."""
        try:
            yield
        except BaseException as error:
            move.done.set_exception(error)
            is_refusal = isinstance(error, BudgetTooSmall | MemoryTooSmall)
            if not is_refusal or isinstance(error, DeviceLost):
                raise
            rank_zero_warn(f"OffloadStrategy stays where it is, because it cannot move: {error}")

    def refuse_all(self) -> None:
        """Refuse the moves that wait, because no step follows."""
        while self._waiting:
            self._pop().done.set_exception(
                OffloadError("the run ended before the step that would have moved: nothing moved")
            )


def target_on(run: StrategyRun, device: torch.device) -> Target:
    """Return the run's target on another device. Raise `OffloadError` if there is none."""
    request = run.request
    if request.target.make_runner is not None:
        raise OffloadError("a fleet gives its jobs their devices: this job cannot choose one")
    if not all(guest.closed for guest in run.guests.admitted):
        raise OffloadError(
            "the nets of high_priority() are on the device that would be left: end their blocks"
            " before move_to(device=...)"
        )
    device = check_cuda(device) if device.type == "cuda" else device
    accelerator = accelerator_for(device.type)
    target = target_of(request.engine, accelerator, device, request.host_dir)
    return replace(target, gate=run.gate)
