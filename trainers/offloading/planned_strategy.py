"""The methods that Lightning calls of an offloading strategy.

    Trainer.fit --> training_step    begins a step: from here on kernels are deferred
                    post_backward    ends it if gradients are accumulated, and keeps them;
                                     on several devices it goes on, so that they work at once
                    optimizer_step   ends it: a plan runs the kernels

    validation_step, test_step, predict_step, a training_step that optimizes by hand: one step each

The module's Python runs in every step as in plain Lightning, and its bits are the same
(offload/live). Between two steps everything runs at once. Lightning clips gradients by norm within
`optimizer_step`: its `_foreach` calls become tasks of the step's plan (offload/live/graphs.py).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from offload import OffloadError, PlanCache
from offload.live.core import why_no_core
from offload.memory.file_memory import check_folder
from offload.running.drivers.device_loss import device_lost
from offload.running.runner_memory import Migration
from offload.sizes import format_size
from trainers.lightning_seams import is_accumulating, log_for_batch, logging_as
from trainers.offloading.devices import (
    drop_results,
    keep_on_host,
    move,
    move_run,
    set_device,
    step_tensors,
)
from trainers.offloading.micro_batches import MicroBatches
from trainers.offloading.moves import PendingMoves
from trainers.offloading.run import StrategyRun
from trainers.steps.plan_request import PlanRequest
from trainers.steps.target import ON_CPU, Target, accelerator_for, check_engine, target_of

log = logging.getLogger(__name__)


class PlannedStrategy(Strategy):
    """Is combined with one of Lightning's strategies, whose own methods do the work of a step."""

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
        devices: int = 1,
        micro_batches: int = 1,
        **more: Any,
    ) -> None:
        """`budget` is a number of bytes, a size (8GiB), or a share of what the step needs without
        offloading (80%); None sets no limit. `plan_cache`: a folder in which plans and measurements
        are kept, so that the next start of the same run neither measures nor searches again; None
        writes nothing. `host_dir`: a folder for files that are the host's memory, on a CPU (docs).
        `devices`: spreads each step over so many, from the trainer's one on. Each has the budget;
        on the CPU they are parts of its memory. `micro_batches`: splits each batch into so many,
        whose gradients are added up. `more` is given to Lightning's strategy."""
        super().__init__(**more)
        cache = None if plan_cache is None else PlanCache(plan_cache)
        folder = None if host_dir is None else check_folder(host_dir)
        request = PlanRequest(
            budget,
            host_budget,
            recompute,
            optimizer,
            engine,
            verify,
            cache=cache,
            host_dir=folder,
            devices=devices,
        )
        check_engine(engine)
        self._parts = MicroBatches(micro_batches)
        self._start_run(request)

    def _start_run(self, request: PlanRequest) -> None:
        self._run = StrategyRun(request)
        self._run.connected = self.lightning_module
        self._moves = PendingMoves(self._run)
        self._is_in_update = False
        self._is_accumulating = False
        """Whether the open step goes on in the next micro-batch."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or another process, has a run of its own: it has none of this one's plans."""
        run = self._run
        if not all(guest.closed for guest in run.guests.admitted):
            raise OffloadError(
                "a strategy cannot be copied or sent to another process in a block of"
                " high_priority(): its requests come in this process. Begin the block in the"
                " process that trains"
            )
        state = super().__getstate__()
        del state["_moves"]
        return state | {"_run": replace(run.request, target=ON_CPU, reserved=int)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        request = state.pop("_run")
        super().__setstate__(state)
        self._start_run(request)

    # ---- steps -----------------------------------------------------------------------------------

    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        self._run.session.interrupt.deliver()
        if not self._run.is_eager:
            self._make_moves()
        return super().batch_to_device(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._run.module.automatic_optimization:
            self._parts.check_automatic()
            with self._whole_step("training_step", args):
                return super().training_step(*args, **kwargs)
        # An optimizer may ask for the loss several times, and several devices work on all
        # micro-batches of an update at once.
        if not self._is_in_update and not self._is_accumulating:
            self._end_step()  # the last one has not come to its update
        self._begin_step("training_step", args)
        with self._devices_watched():
            given = self._parts.begin(args)
            if self._parts.are_left:
                log_for_batch(self._run.module.trainer, given[0])
            return self._parts.check(super().training_step(*given, **kwargs))

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Go backward, and then run the other micro-batches of this batch."""
        if not self._parts.are_left:
            return super().backward(closure_loss, *args, **kwargs)
        module, trainer = self._run.module, self._run.module.trainer
        closure_loss = super().backward(self._parts.weigh(closure_loss), *args, **kwargs)
        while self._parts.are_left:
            given = self._parts.next()
            log_for_batch(trainer, given[0])
            with logging_as(module, "training_step"):
                made = super().training_step(*given)
            loss = self._parts.loss_of(made, trainer.accumulate_grad_batches)
            with logging_as(module, "backward"):
                super().backward(self._parts.weigh(loss), *args, **kwargs)
        log_for_batch(trainer, self._parts.whole)
        return closure_loss

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        module = self._run.module
        if self._parts.are_left:
            return
        if module.automatic_optimization and is_accumulating(module.trainer):
            self._is_accumulating = self._run.request.joins_batches
            if not self._is_accumulating:
                self._end_step()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        self._is_in_update = True
        try:
            with self._devices_watched():
                result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._is_in_update = False
        if self._run.module.automatic_optimization:
            self._end_step(optimizer)
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_step("validation_step", args):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_step("test_step", args):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._whole_step("predict_step", args):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _whole_step(self, name: str, inputs: Any) -> Iterator[None]:
        self._end_step()
        self._begin_step(name, inputs)
        with self._devices_watched():
            yield
        self._end_step()

    def _begin_step(self, name: str, inputs: Any) -> None:
        self._run.begin_step(name, inputs, self.optimizers, self.root_device)

    def _end_step(self, optimizer: Optimizer | None = None) -> None:
        """End the step if one is open, after its update by this optimizer."""
        self._is_accumulating = False
        with self._devices_watched():
            self._run.end_step(optimizer)

    def _devices_watched(self) -> AbstractContextManager[None]:
        return self._run.session.watch_devices(*self._run.devices)

    # ---- a run -----------------------------------------------------------------------------------

    def connect(self, model: L.LightningModule) -> None:
        super().connect(model)
        self._run.connected = model

    def setup_environment(self) -> None:
        target = self.find_target()
        super().setup_environment()
        before = self._run.request.target
        if target.device == before.device:
            target = replace(target, costs=before.costs)
        self._run.request = self._run.request.for_target(target, self.precision_plugin)

    def find_target(self) -> Target:
        """Return the trainer's device and the engine for it. Raise `OffloadError` if there is
        none."""
        request = self._run.request
        target = target_of(request.engine, self.accelerator, self.root_device, request.host_dir)
        return replace(target, gate=self._run.gate)

    def model_to_device(self) -> None:
        """Leave the module on the host. The first plan moves what it keeps on a GPU."""
        if self.root_device.type == "cpu":
            super().model_to_device()
        else:
            keep_on_host(self._run.module, self.root_device)

    def setup(self, trainer: L.Trainer) -> None:
        self._close()
        self._run.session.lost = None
        self._run.guests.check()
        super().setup(trainer)
        self._run.set_up(is_fit=trainer.state.fn == TrainerFn.FITTING)
        if reason := why_no_core():
            self._train_eagerly(reason)
        self._run.is_set_up = True

    def _train_eagerly(self, reason: str) -> None:
        self._run.request.check_eager(reason)
        rank_zero_warn(f"OffloadStrategy trains eagerly, without offloading: {reason}")
        self._run.is_eager = True
        if self.root_device.type != "cpu":
            move(step_tensors(self._run.module, self.optimizers), self.root_device)
            set_device(self._run.module, self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the states without moving them: before there is a plan they belong on the host."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._run.guests.log_waits(self._run.module.trainer)
        self._end_step()  # the run may have been stopped between two micro-batches
        self._run.session.interrupt.deliver()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        session = self._run.session
        session.lost = session.lost or device_lost(exception, *self._run.devices)
        self._close_for_good()
        if session.has_lost_results:
            drop_results(self._run.module.trainer)

    def teardown(self) -> None:
        self._close_for_good()
        if self._run.session.lost is None:
            super().teardown()
        else:  # Lightning would copy tensors from the lost device
            drop_results(self._run.module.trainer)

    def _close_for_good(self) -> None:
        with closing(self._run.gate):
            self._close()

    def _close(self) -> None:
        """Give the tensors memory of their own."""
        self._run.is_set_up = self._is_accumulating = False
        self._parts.end()
        self._moves.refuse_all()
        self._run.session.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._run.session.check_not_lost()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._run.session.check_not_lost()
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._run.session.check_not_lost()
        super().save_checkpoint(*args, **kwargs)

    # ---- moves -----------------------------------------------------------------------------------

    def _make_moves(self) -> None:
        """Make the moves that wait, if an optimizer step begins now."""
        trainer = self._run.module.trainer
        begun = trainer.fit_loop.epoch_loop.batch_idx + 1
        is_due = self._run.request.joins_batches or begun % trainer.accumulate_grad_batches == 0
        if trainer.training and is_due and not self._run.session.is_in_step:
            self._moves.make_all(self.root_device, self._relocate)

    def _relocate(self, request: PlanRequest) -> Migration:
        """Have this run be one of another device. All tensors come home, and go on from there."""
        begun, old, new = monotonic(), self._run.request.target, request.target
        self._run.session.close()
        self._run.request, self._root_device = request, new.device
        self.accelerator = accelerator = accelerator_for(new.device.type)
        accelerator.setup_device(new.device)
        tensors = step_tensors(self._run.module, self.optimizers)
        move_run(self._run.module, tensors, self.precision_plugin, old.device, new.device)
        moved = Migration(sum(t.nbytes for t in tensors), monotonic() - begun, "by the host")
        self._run.remark = (
            f"moved here from {old.name} before step {self._run.module.trainer.global_step}:"
            f" {format_size(moved.nbytes)} in {moved.seconds:.2f} s"
        )
        log.info("the run %s", self._run.remark)
        if old.name != new.name:
            rank_zero_warn(
                f"the training moved from {old.name} to {new.name}: the weights are equal, and"
                " later bits are those of the new device's kernels"
            )
        return moved
