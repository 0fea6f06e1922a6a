"""The methods that Lightning calls of an offloading strategy.

    Trainer.fit --> training_step    begins a step: from here on kernels are deferred
                    backward         ends it if gradients are accumulated, and keeps them
                    optimizer_step   ends it: a plan runs the kernels

    validation_step, test_step, predict_step, a training_step that optimizes by hand: one step each

The module's Python runs in every step as in plain Lightning, and its bits are the same
(offload/live). Between two steps everything runs at once.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from offload import DeviceLost, OffloadError, Plan, PlanCache
from offload.gate import Gate
from offload.live.core import why_no_core
from offload.live.session import LiveSession
from offload.memory.file_memory import checked_folder
from offload.running.drivers.cuda import check_cuda
from offload.running.drivers.device_loss import device_lost
from offload.running.runner_memory import Migration
from offload.running.stage import Stage
from offload.sizes import say_size
from trainers.lightning_seams import is_accumulating
from trainers.offloading.guests import Guests, Loss
from trainers.offloading.hardware.devices import (
    bring_along,
    bring_gradients,
    forget_results,
    keep_on_host,
    move,
    tell,
    tensors_of,
)
from trainers.offloading.hardware.generators import hand_over
from trainers.offloading.hardware.meter import MeasuredPlan, Meter, TimeSpent
from trainers.offloading.hardware.target import (
    ON_CPU,
    Target,
    accelerator_for,
    check_engine,
    target_of,
)
from trainers.offloading.interrupt import DelayedInterrupt
from trainers.offloading.live_moves import SAME, Move, Moves
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
        self._moves = Moves()
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

    # ---- moves -----------------------------------------------------------------------------------

    def move_to(
        self, budget: str | int | None = SAME, device: torch.device | str | None = None
    ) -> Future[Migration]:
        """Have the training go on within another budget, or on another device. Any thread may call
        this while the trainer fits. The tensors move between two steps. The result has the bytes
        that moved and the seconds that it took, or raises `MemoryTooSmall` where there was no room:
        then nothing has moved.

        Another budget: the plan is made here, and all bits stay the same. Another `device`: on a
        GPU like the one before all bits stay the same. On another kind of device the weights are
        equal at the move, and a warning says that later bits are the new device's."""
        if isinstance(self, ParallelStrategy):
            raise OffloadError("move_to() moves one process; the ranks of DDP must move together")
        if self._eager:
            raise OffloadError("this run trains eagerly, so it has no plan that could move")
        try:
            there = self.root_device if device is None else torch.device(device)
        except RuntimeError as error:
            raise OffloadError(f"move_to(device={device!r}): {error}") from None
        if there == self.root_device and budget == SAME:
            raise OffloadError(
                f"move_to() names no other place than the run has: give another budget, or another"
                f" device than {self.root_device}"
            )
        if self._session is None or self._session.plan is None:
            raise OffloadError(
                "move_to() comes before the first step, so there is no plan to move from: give the"
                " budget to the strategy, give the device to the Trainer, or call it from the"
                " second step on"
            )
        asked = self._request
        if there != self.root_device:
            asked = asked.on(self._target_on(there), self.precision_plugin)
        if budget != SAME:
            asked = replace(asked, budget=budget)
        plans = self._session.plans
        planner = LivePlanner(asked, self._meter)
        move = Move(asked, self._session.plan, plans.planned_in(asked.budget, planner))
        return self._moves.add(move)

    def _target_on(self, device: torch.device) -> Target:
        """This run's target on another device. Raise `OffloadError` if there is none."""
        if self._request.target.make_runner is not None:
            raise OffloadError("a fleet gives its jobs their devices: this job cannot choose one")
        if not all(guest.closed for guest in self._guests.all):
            raise OffloadError(
                "the nets of high_priority() are on the device that would be left: end their blocks"
                " before move_to(device=...)"
            )
        device = check_cuda(device) if device.type == "cuda" else device
        kind, asked = accelerator_for(device.type), self._request
        return replace(target_of(asked.engine, kind, device, asked.host_dir), gate=self._gate)

    def _make_moves(self) -> None:
        """Go on where somebody has asked for, if an optimizer step begins now."""
        trainer = self._module.trainer
        begun = trainer.fit_loop.epoch_loop.batch_idx + 1
        if not trainer.training or begun % trainer.accumulate_grad_batches:
            return
        while move := self._moves.next():
            with self._device_loss_noted(), self._interrupt.held(), self._moves.refusing(move):
                move.done.set_result(self._moved(move))

    def _moved(self, move: Move) -> Migration:
        session, planner = self._session, self._planner
        if move.asked.target.device != self.root_device:
            return self._go_to(move.asked)
        if session is None or planner is None:  # it has just gone to another device
            self._request = replace(self._request, budget=move.asked.budget)
            return Migration(0, 0.0, "before the first step there")
        found, asked = move.plan, replace(self._request, budget=move.asked.budget)
        if session.plan is not move.before:
            found = session.plans.planned_in(asked.budget, LivePlanner(asked, self._meter))
        moved = session.plans.move_to(asked.budget, found)
        self._request = planner.request = asked
        return moved

    def _go_to(self, asked: PlanRequest) -> Migration:
        """Have this run be one of another device. All tensors come home, and go on from there."""
        begun, old, new = monotonic(), self._request.target, asked.target
        self._close_session()
        self._request, self._root_device = asked, new.device
        self.accelerator = accelerator = accelerator_for(new.device.type)
        accelerator.setup_device(new.device)
        if isinstance(self.precision_plugin, MixedPrecision):
            self.precision_plugin.device = new.device.type
        tell(self._module, new.device)
        hand_over(old.device, new.device)
        bring_along(self._module.trainer, old.device, new.device)
        tensors = tensors_of(self._module, self.optimizers)
        bring_gradients(tensors)
        moved = Migration(sum(t.nbytes for t in tensors), monotonic() - begun, "by the host")
        step = self._module.trainer.global_step
        size = say_size(moved.nbytes)
        self._remark = (
            f"moved here from {old.name} before step {step}: {size} in {moved.seconds:.2f} s"
        )
        if old.name != new.name:
            rank_zero_warn(
                f"the training moved from {old.name} to {new.name}: the weights are equal, and"
                " later bits are those of the new device's kernels"
            )
        return moved

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
        if why := self._why_not():
            self._go_eager(why)

    def _why_not(self) -> str:
        """Why this run has no live steps; empty if it has."""
        return why_no_core()

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
        if not self._eager:
            self._make_moves()
        return super().batch_to_device(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module.automatic_optimization:
            with self._one_step("training_step", args):
                return super().training_step(*args, **kwargs)
        if not self._is_in_update:  # an optimizer may ask for the loss several times
            self._end_open()  # the last one has not come to its update
        self._begin_step("training_step", args)
        return super().training_step(*args, **kwargs)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
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
        if self._module.automatic_optimization:
            # The next backward pass clears the gradients first. Until then they would take room.
            self._end_step(() if self._request.budget is not None else self._parameters())
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("validation_step", args):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("test_step", args):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._one_step("predict_step", args):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _one_step(self, name: str, given: Any) -> Iterator[None]:
        self._end_open()
        self._begin_step(name, given)
        yield
        self._end_open()

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
        self._close_session()
        self._planner = LivePlanner(self._request, self._meter, self._remark)
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
        self._moves.end()
        self._close_session()

    def _close_session(self) -> None:
        session, self._session = self._session, None
        self._planner = None
        if session is None:
            return
        self._plan = session.plan or self._plan
        is_in_step, self._is_in_step = self._is_in_step, False
        if self._lost is not None:
            session.abandon()
            return
        with self._gate.held():  # a guest may have borrowed the memory that is given back
            if is_in_step:
                session.end_as_issued()
            session.__exit__(None, None, None)

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
