"""One run of a trainer in a live session: its plans, its guests, and its end.

first step   opens the session        later steps   the same one        teardown   closes it
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from offload import DeviceLost, OffloadError, Plan, PlanCache
from offload.gate import Gate
from offload.live.session import LiveSession
from offload.memory.file_memory import checked_folder
from offload.running.drivers.device_loss import device_lost
from offload.running.stage import Stage
from trainers.offloading.guests import Guests, Loss
from trainers.offloading.hardware.meter import MeasuredPlan, Meter, TimeSpent
from trainers.offloading.hardware.target import (
    ON_CPU,
    Target,
    check_engine,
)
from trainers.offloading.interrupt import DelayedInterrupt
from trainers.offloading.live_moves import LiveMoves
from trainers.offloading.live_planner import LivePlanner
from trainers.offloading.plan_request import PlanRequest
from trainers.sharing.high_priority import HighPriority


class SessionOwner(Protocol):
    """A run that has a session open."""

    def give_way(self) -> None: ...


class OpenRun(threading.local):
    """Which run of a thread has a session open."""

    def __init__(self) -> None:
        self.run: SessionOwner | None = None


OPEN = OpenRun()


class LiveRun(Strategy):
    """What a strategy knows of its run."""

    def __init__(
        self,
        budget: str | int | None = None,
        host_budget: str | int | None = None,
        recompute: str = "auto",
        optimizer: str = "auto",
        engine: str = "auto",
        verify: bool = True,
        plan_cache: str | Path | None = None,
        host_dir: str | Path | None = None,
        **more: Any,
    ) -> None:
        """`budget` is a number of bytes, a size (8GiB), or a share of what the step needs without
        offloading (80%); None sets no limit. `plan_cache`: a folder in which plans and measurements
        are kept, so that the next start of the same run neither measures nor searches again; None
        writes nothing. `host_dir`: a folder for files that are the host's memory, on a CPU (docs).
        `more` is given to Lightning's strategy."""
        super().__init__(**more)
        cache = None if plan_cache is None else PlanCache(plan_cache)
        folder = None if host_dir is None else checked_folder(host_dir)
        self._request = PlanRequest(
            budget, host_budget, recompute, optimizer, engine, verify, cache=cache, host_dir=folder
        )
        check_engine(engine)
        before = {*self.__dict__}
        self._begin()
        self._of_a_fit = {*self.__dict__} - before

    def _begin(self) -> None:
        """Know of no fit."""
        self._lost: DeviceLost | None = None
        self._interrupt = DelayedInterrupt()
        self._session: LiveSession | None = None
        self._planner: LivePlanner | None = None
        self._moves = LiveMoves()
        self._session_of: tuple[Any, ...] = ()
        """The optimizers of the session."""
        self._reset()

    def _reset(self) -> None:
        """Forget the last fit."""
        self._eager = False
        self._runs = False
        """Whether Lightning has set the run up and not torn it down: nobody would end a live step
        that somebody begins by hand afterwards."""
        self._plan: Plan | None = None
        self._planned_before = 0
        """How many steps plans ran in sessions that are closed."""
        self._meter = Meter()
        self._is_in_step = False
        self._is_in_update = False
        self._is_unrun = False
        """Whether the kernels of the last step did not run, so that what it logged has no bytes."""
        self._needs: list[tuple[int, int]] = []
        """Of the steps that were planned and did not run."""
        self._counters: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Those on the CPU run at once: as the first step that has no plan yet has found them."""
        self._holds = ExitStack()
        """While a step is open, Ctrl-C waits for its end."""
        self._remark = ""
        """What `explain` tells of how the run came to its device."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or another process, begins a fit of its own: it has none of this one's plans."""
        guests = self.__dict__.get("_guests")
        if guests is not None and not all(one.closed for one in guests.all):
            raise OffloadError(
                "a strategy cannot be copied or sent to another process in a block of"
                " high_priority(): its requests come in this process. Begin the block in the"
                " process that trains"
            )
        own = {"_guests", *self._of_a_fit}
        state = {name: value for name, value in super().__getstate__().items() if name not in own}
        return state | {"_request": replace(self._request, target=ON_CPU, reserved=int)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    # ---- what a user reads -----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the largest part of a step. It exists after the first step."""
        plan = self._session.plan if self._session is not None else None
        self._plan = plan or self._plan
        if self._plan is None:
            why = (
                "this run trains eagerly"
                if self._eager
                else "it is made in the first step, or, without a budget, in the second one like it"
            )
            raise OffloadError(f"there is no plan: {why}")
        return self._plan

    def explain(self) -> str:
        """Explain the plan on one screen of text, with what requests of high priority took."""
        lines = [f"high priority: {guest.waits.said()}" for guest in self._guests.all]
        return "\n".join([self.plan.explain(), *lines])

    @property
    def spent(self) -> TimeSpent:
        """The time that the planned steps of this fit took so far, and how long they waited."""
        self._rest()
        return self._meter.spent

    @property
    def plans(self) -> tuple[MeasuredPlan, ...]:
        """The plans that ran, and the time that their runs took."""
        self._rest()
        return self._meter.plans

    def _rest(self) -> None:
        if self._session is not None:
            self._session.flights.rest()

    @property
    def planned_steps(self) -> int:
        """How many steps of this fit ran by plans, all parts of them."""
        session = self._session
        return self._planned_before + (session.planned_steps if session is not None else 0)

    @property
    def target(self) -> Target:
        """The device, engine and rates of the last run."""
        return self._request.target

    # ---- guests ----------------------------------------------------------------------------------

    @cached_property
    def _guests(self) -> Guests:
        return Guests(lambda: self._request.target, self._stage, lambda: self.lightning_module)

    @property
    def _gate(self) -> Gate:
        return self._guests.gate

    def high_priority(
        self,
        net: torch.nn.Module,
        budget: str | int | None = None,
        *,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        priority: int = 0,
        seed: int = 0,
    ) -> HighPriority:
        """Return what answers requests by `net` between two nodes of this run's steps, from any
        thread: `with strategy.high_priority(net, budget="1GiB") as serve: y = serve(x)`.

        `budget`: its bytes of the device. `loss` and `optimizer` make it a training job: each call
        is a step, and returns the loss. The highest `priority` comes first. `seed`: of its random
        numbers."""
        if self._session is not None:  # a guest has dice of its own: nothing else may draw then
            self._session.flights.forbid()
        has_budget = self._request.budget is not None
        return self._guests.admit(net, budget, loss, optimizer, priority, seed, has_budget)

    def _stage(self) -> Stage | None:
        """The stage of the steps; None before the first one and after the last."""
        runner = self._session.plans.runner if self._session is not None else None
        return runner.stage if runner is not None else None

    def _log_guests(self) -> None:
        """Give the loggers how long the requests of this run took."""
        trainer = self._module.trainer
        guests = self._guests.all
        for number, guest in enumerate(guests):
            name = f"sharing{number}" if len(guests) > 1 else "sharing"
            if metrics := guest.waits.metrics(name):
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, trainer.global_step)

    # ---- the session ----------------------------------------------------------------------------

    def _parameters(self) -> Iterator[torch.Tensor]:
        yield from self._module.parameters()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    @property
    def _session_budget(self) -> str | int | None:
        return self._request.budget

    def _open_session(self, *, runs: bool = True) -> LiveSession:
        if self._session is not None and self._session_of == tuple(map(id, self.optimizers)):
            return self._session
        self._close_session()
        if OPEN.run is not None:
            OPEN.run.give_way()
        self._planner = LivePlanner(self._request, self._meter, self._remark)
        session = LiveSession(
            self._module,
            *self.optimizers,
            budget=self._session_budget,
            device=self.root_device,
            planner=self._planner,
            runs=runs,
            overlaps=not self._guests.all and self._request.target.make_runner is None,
        )
        session.__enter__()
        self._session, self._session_of = session, tuple(map(id, self.optimizers))
        OPEN.run = self
        return session

    def give_way(self) -> None:
        """Close the session between two steps, because another trainer runs in this thread. The
        next step opens one again."""
        if self._is_in_step:
            raise OffloadError(
                "a trainer runs within a step of another one, whose strategy offloads: run it"
                " between two steps, or in another thread"
            )
        self._close_session()

    @property
    def _module(self) -> L.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @contextmanager
    def _device_loss_noted(self) -> Iterator[None]:
        """Note a lost device in `_lost`, and raise that error in place of others."""
        try:
            yield
        except Exception as error:
            self._lost = self._lost or device_lost(error, self.root_device)
            if self._lost is None or self._lost is error:
                raise
            raise self._lost from error

    def _close(self) -> None:
        """Give the tensors memory of their own."""
        self._runs = False
        self._moves.end()
        self._close_session()

    def _close_session(self) -> None:
        session, self._session = self._session, None
        self._planner = None
        if session is None:
            return
        OPEN.run = None
        session.flights.rest()
        self._plan = session.plan or self._plan
        self._planned_before += session.planned_steps
        is_in_step, self._is_in_step = self._is_in_step, False
        if self._lost is not None:
            self._holds.close()
            session.abandon()
            return
        with self._holds, self._gate.held():  # a guest may have borrowed what is given back
            if is_in_step:
                session.end_as_issued()
            session.__exit__(None, None, None)
        if session.plans.refused:  # nothing of the step has happened: the module may train anew
            for counter, before in self._counters:
                counter.data.copy_(before)

    def _check_not_lost(self) -> None:
        """Raise `DeviceLost` if the device is lost, and the weights on it with it."""
        if self._lost is not None:
            raise self._lost

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._check_not_lost()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_not_lost()
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._check_not_lost()
        super().save_checkpoint(*args, **kwargs)
