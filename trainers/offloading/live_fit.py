"""The methods that Lightning calls of an offloading strategy.

    Trainer.fit --> training_step    begins a step: from here on kernels are deferred
                    backward         ends it if gradients are accumulated, and keeps them
                    optimizer_step   ends it: a plan runs the kernels

    validation_step, test_step, predict_step, a training_step that optimizes by hand: one step each

The module's Python runs in every step as in plain Lightning, and its bits are the same
(offload/live). Between two steps everything runs at once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from offload import DeviceLost, OffloadError, Plan, PlanCache
from offload.gate import Gate
from offload.live.core import why_no_core
from offload.live.session import LiveSession
from offload.memory.file_memory import checked_folder
from offload.running.drivers.device_loss import device_lost
from offload.running.stage import Stage
from trainers.lightning_seams import is_accumulating
from trainers.offloading.guests import Guests, Loss
from trainers.offloading.hardware.devices import (
    forget_results,
    keep_on_host,
    move,
    tell,
    tensors_of,
)
from trainers.offloading.hardware.meter import MeasuredPlan, Meter, TimeSpent
from trainers.offloading.hardware.target import ON_CPU, Target, check_engine, target_of
from trainers.offloading.interrupt import DelayedInterrupt
from trainers.offloading.live_planner import LivePlanner
from trainers.offloading.steps.plan_request import PlanRequest
from trainers.sharing.high_priority import HighPriority


class LiveFit(Strategy):
    """Is mixed into one of Lightning's strategies, whose own methods do the work of a step."""

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
        self._session_of: tuple[Any, ...] = ()
        """The optimizers of the session."""
        self._reset()

    def _reset(self) -> None:
        """Forget the last fit."""
        self._eager = False
        self._plan: Plan | None = None
        self._meter = Meter()
        self._is_in_step = False
        self._is_in_update = False
        self._fresh: set[torch.Tensor] = set()
        """The parameters whose gradients no update has used yet."""

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
                else "it is made at the first batch: read it after that"
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
        return self._meter.spent

    @property
    def plans(self) -> tuple[MeasuredPlan, ...]:
        """The plans that ran, and the time that their runs took."""
        return self._meter.plans

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

    # ---- a run -----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        target = self.find_target()
        super().setup_environment()
        before = self._request.target
        if target.device == before.device:
            target = replace(target, costs=before.costs)
        self._request = self._request.on(target, self.precision_plugin)

    def find_target(self) -> Target:
        """Return the trainer's device and the engine for it. Raise `OffloadError` if there is
        none."""
        engine, host_dir = self._request.engine, self._request.host_dir
        target = target_of(engine, self.accelerator, self.root_device, host_dir)
        return replace(target, gate=self._gate)

    def model_to_device(self) -> None:
        """Leave the module on the host. The first plan moves what it keeps on a GPU."""
        if self.root_device.type == "cpu":
            super().model_to_device()
        else:
            keep_on_host(self._module, self.root_device)

    def setup(self, trainer: L.Trainer) -> None:
        self._close()
        self._lost = None
        self._guests.check()
        super().setup(trainer)
        self._gate.open()
        self._request = replace(self._request, reserved=self._guests.reserved)
        self._eager = False
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset()
        if why := why_no_core():
            self._go_eager(why)

    def _go_eager(self, why: str) -> None:
        self._request.check_eager(why)
        rank_zero_warn(f"OffloadStrategy trains eagerly, without offloading: {why}")
        self._eager = True
        if self.root_device.type != "cpu":
            move(tensors_of(self._module, self.optimizers), self.root_device)
            tell(self._module, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the states without moving them: before there is a plan they belong on the host."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._log_guests()
        self._end_open()  # the run may have been stopped between two micro-batches
        self._interrupt.deliver()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._lost = self._lost or device_lost(exception, self.root_device)
        with closing(self._gate):
            self._close()

    def teardown(self) -> None:
        with closing(self._gate):
            self._close()
        if self._lost is None:
            super().teardown()
        else:  # Lightning would copy tensors from the lost device
            forget_results(self._module.trainer)

    # ---- steps -----------------------------------------------------------------------------------

    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        self._interrupt.deliver()
        return super().batch_to_device(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module.automatic_optimization:
            with self._one_step("training_step", args, lambda: self._fresh):
                return super().training_step(*args, **kwargs)
        if not self._is_in_update:  # an optimizer may ask for the loss several times
            self._end_open()  # the last one has not come to its update
        self._begin_step("training_step", args)
        return super().training_step(*args, **kwargs)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._fresh = {*self._parameters()}
        if self._module.automatic_optimization and is_accumulating(self._module.trainer):
            self._end_open()
        return loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        self._is_in_update = True
        try:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._is_in_update = False
        for group in optimizer.param_groups:
            self._fresh.difference_update(group["params"])
        if self._module.automatic_optimization:
            self._end_step(())
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("validation_step", args, self._parameters):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("test_step", args, self._parameters):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("predict_step", args, self._parameters):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _one_step(
        self, name: str, given: Any, keeps: Callable[[], Iterable[torch.Tensor]]
    ) -> Iterator[None]:
        self._end_open()
        self._begin_step(name, given)
        yield
        self._end_step(keeps())

    def _begin_step(self, name: str, given: Any) -> None:
        if self._eager or self._is_in_step:
            return
        session = self._open_session()
        assert self._planner is not None
        self._planner.inputs, self._planner.part = _shapes(given), name
        session.begin(name)
        self._is_in_step = True

    def _end_open(self) -> None:
        """End the step that is open. All gradients are kept."""
        self._end_step(self._parameters())

    def _end_step(self, keeps: Iterable[torch.Tensor]) -> None:
        if not self._is_in_step:
            return
        assert self._session is not None
        self._is_in_step = False
        with self._device_loss_noted(), self._interrupt.held():
            self._session.end(keeps=[*keeps])

    def _parameters(self) -> Iterator[torch.Tensor]:
        yield from self._module.parameters()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _open_session(self) -> LiveSession:
        if self._session is not None and self._session_of == tuple(map(id, self.optimizers)):
            return self._session
        self._close()
        self._planner = LivePlanner(self._request, self._meter)
        session = LiveSession(
            self._module,
            *self.optimizers,
            budget=self._request.budget,
            device=self.root_device,
            planner=self._planner,
        )
        session.__enter__()
        self._session, self._session_of = session, tuple(map(id, self.optimizers))
        return session

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
        session, self._session = self._session, None
        if session is None:
            return
        self._plan = session.plan or self._plan
        with self._gate.held():  # a guest may have borrowed the memory that is given back
            if self._is_in_step:
                self._is_in_step = False
                session.end_as_issued()
            session.__exit__(None, None, None)


def _shapes(given: Any) -> str:
    found = [str(tuple(t.shape)) for t in _tensors(given)]
    return ", ".join(found)


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict):
        yield from _tensors([*given.values()])
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _tensors(one)
