"""What an offloading strategy does in a training or an evaluation step, and when it gives up.

    training step    capture and plan it (steps/step_graphs.py), compare the first steps with plain
                     Lightning's (steps/first_steps.py), then run it, alone or with the other
                     micro-batches of its optimizer step (steps/groups.py)
    evaluation step  capture and plan it too (steps/evaluation.py)

There is one graph per situation: shapes of the batch, first, middle or last micro-batch, Python
values that the step reads, parameters that require a gradient. All graphs run over the same tensors
in one runner, which gives the tensors memory of their own again at the end of the fit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn

from offload import CaptureError, DeviceLost, OffloadError, Plan, PlanCache
from offload.memory.file_memory import checked_folder
from offload.running.drivers.device_loss import device_lost
from offload.tracing.ranks import Ranks
from trainers.lightning_seams import is_accumulating, skips_backward
from trainers.offloading.hardware.devices import move, tell, tensors_of
from trainers.offloading.hardware.meter import MeasuredPlan, Meter, TimeSpent
from trainers.offloading.hardware.target import Target, check_engine, target_of
from trainers.offloading.interrupt import DelayedInterrupt
from trainers.offloading.steps.audit import check_part
from trainers.offloading.steps.comparison import ExpectedStep
from trainers.offloading.steps.evaluation import Evaluation
from trainers.offloading.steps.first_steps import FirstSteps, check_count
from trainers.offloading.steps.groups import Groups
from trainers.offloading.steps.micro_batch import MicroBatch, StepGraph
from trainers.offloading.steps.movable_steps import MovableSteps
from trainers.offloading.steps.plan_request import PlanRequest
from trainers.offloading.tracing.batch_parts import BatchParts
from trainers.offloading.tracing.hooks import STEP_HOOKS, SilencedHook
from trainers.offloading.tracing.refusals import MODULE_HOOKS, reason, user_error


class PlannedSteps(Strategy):
    """Plans and runs the steps of one strategy, and answers the user's questions about them."""

    def __init__(
        self,
        budget: str | int | None = None,
        host_budget: str | int | None = None,
        recompute: str = "auto",
        optimizer: str = "auto",
        engine: str = "auto",
        verify: bool = True,
        check_first_steps: int = 2,
        audit: float = 0.01,
        plan_cache: str | Path | None = None,
        host_dir: str | Path | None = None,
        **more: Any,
    ) -> None:
        """`budget` is a number of bytes, a size (8GiB), or a share of what the step needs without
        offloading (80%); None sets no limit. A run that cannot be planned is refused if it has a
        budget, and trained eagerly otherwise. `check_first_steps`: plain Lightning makes so many
        optimizer steps too, and a difference stops the run; these steps need the memory of both.
        `audit`: the part of the time that goes into tracing the step again, to find changes that no
        watch sees; 0 switches that off. `plan_cache`: a folder in which plans and measurements are
        kept, so that the next start of the same run neither measures nor searches again; None
        writes nothing. `host_dir`: a folder for files that are the host's memory, on a CPU (docs).
        `more` is given to Lightning's strategy."""
        super().__init__(**more)
        cache = None if plan_cache is None else PlanCache(plan_cache)
        folder = None if host_dir is None else checked_folder(host_dir)
        self._request = PlanRequest(
            budget, host_budget, recompute, optimizer, engine, verify, cache=cache, host_dir=folder
        )
        check_count(check_first_steps)
        check_part(audit)
        self._audit = audit
        check_engine(engine)
        self._check_first_steps = check_first_steps
        before = {*self.__dict__}
        self._begin()
        self._of_a_fit = {*self.__dict__} - before

    def _begin(self) -> None:
        """Know of no fit."""
        self._lost: DeviceLost | None = None
        self._steps: MovableSteps | None = None
        self._groups: Groups | None = None
        self._silence = SilencedHook()
        self._interrupt = DelayedInterrupt()
        self._evaluation: Evaluation | None = None
        self._budget_bytes: int | None = None  # of the last fit
        self._reset()

    def _reset(self) -> None:
        """Forget the last fit."""
        self._eager = False
        self._decided: tuple[Any, ...] | None = None
        """What the decision to plan this run was made on."""
        self._begin_checks()
        self._plan: Plan | None = None
        self._micro_batches = ""
        """One line that says how the micro-batches of an optimizer step run, and why."""
        self._meter = Meter()

    def _begin_checks(self) -> None:
        """Compare the next steps with plain Lightning's."""
        # One of several ranks cannot go on eagerly alone.
        falls_back = self._request.budget is None and not isinstance(self, ParallelStrategy)
        self._first_steps = FirstSteps(self._check_first_steps, falls_back)

    # ---- what a user reads -----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of a whole training step with its update, or of an evaluation step if the run
        does not train. It exists after the first batch."""
        if self._plan is None:
            why = (
                "this run trains eagerly"
                if self._eager
                else "it is made at the first batch: read it after that"
            )
            raise OffloadError(f"there is no plan: {why}")
        return self._plan

    def explain(self) -> str:
        """Explain the plan on one screen of text."""
        return "\n".join(filter(None, (self.plan.explain(), self._micro_batches)))

    @property
    def spent(self) -> TimeSpent:
        """The time that the planned steps of this fit took so far, and how long they waited."""
        return self._meter.spent

    @property
    def plans(self) -> tuple[MeasuredPlan, ...]:
        """The plans that ran, and the time that their runs took."""
        return self._meter.plans

    def plan_for(self, batch: Any, batch_idx: int = 0) -> Plan | None:
        """Return the plan that a fit would make for such a batch, without running it; None if the
        fit would train eagerly. Call this from `on_train_batch_start`, where a step begins."""
        if not self._is_planned():
            return None
        takes_index = is_param_in_hook_signature(
            self._module.training_step, "batch_idx", min_args=2
        )
        micro = self._micro(batch, batch_idx if takes_index else None)
        try:
            return self._step_graphs().plan_for(micro, BatchParts.of(batch))
        except CaptureError as error:
            if mistake := user_error(error):
                raise mistake from None
            self._go_eager(str(error))
            return None

    @property
    def target(self) -> Target:
        """The device, engine and rates of the last run."""
        return self._request.target

    # ---- training --------------------------------------------------------------------------------

    def _is_planned(self) -> bool:
        if self._eager:
            return False
        trainer = self._module.trainer
        if trainer.state.fn != TrainerFn.FITTING or skips_backward(trainer):
            return False
        if self._decided != (grounds := self._grounds()):
            if why := self._why_not():
                self._go_eager(why)
            self._decided = grounds
        return not self._eager

    def _grounds(self) -> tuple[Any, ...]:
        """Return what `_why_not` depends on and a user may change in the middle of a fit."""
        trainer, module = self._module.trainer, self._module
        own, kind = vars(module), type(module)
        return (
            module.automatic_optimization,
            *map(id, self.optimizers),
            *map(id, trainer.callbacks),  # pyright: ignore[reportAttributeAccessIssue]
            torch.is_anomaly_enabled(),
            *[own.get(name) or getattr(kind, name) for name in (*MODULE_HOOKS, *STEP_HOOKS)],
        )

    def _why_not(self) -> str:
        """Say why this run cannot be planned; empty if nothing is known against it."""
        return reason(self._module.trainer, self._module)

    def _micro(self, batch: Any, batch_idx: int | None = None) -> MicroBatch:
        trainer = self._module.trainer
        loop = trainer.fit_loop.epoch_loop
        return MicroBatch(
            batch,
            batch_idx,
            # Lightning decides in this way whether to zero the gradients, and whether to step.
            first=loop.batch_idx % trainer.accumulate_grad_batches == 0,
            last=not is_accumulating(trainer),
        )

    def _run(self, micro: MicroBatch) -> Any:
        return self._step_graphs().answers.settled(lambda: self._run_once(micro))

    def _run_once(self, micro: MicroBatch) -> Any:
        steps = self._step_graphs()
        if micro.first:
            self._first_steps.begin(steps)
        with self._interrupt.held():
            if self._first_steps.due:
                parts, step = self._capture(micro)
                self._plan = steps.plan
                if self._first_steps.possible(self.plan, self._request.target):
                    target = self._request.target
                    self._first_steps.run(steps, step, parts, self._module, target)
                    return None
            return self._run_planned(micro, steps)

    def _run_planned(self, micro: MicroBatch, steps: MovableSteps) -> Any:
        context = self.precision_plugin.train_step_context
        if self._groups is None:
            self._groups = Groups(steps, self._module, context)
        output = self._groups.take(micro)
        if output is None:
            parts, step = self._capture(micro)
            outputs = steps.run(step, parts, wait=True)
            output = step.recipe.serve(outputs, parts.given, context)
            self._silence.begin(step.zeroed)
        self._groups.leave()
        self._plan = steps.plan
        self._micro_batches = self._groups.summary and f"micro-batches {self._groups.summary}"
        return output

    def _capture(self, micro: MicroBatch) -> tuple[BatchParts, StepGraph]:
        assert self._steps is not None
        parts = BatchParts.of(micro.batch)
        return parts, self._steps.step_for(micro, parts)

    def _step_graphs(self) -> MovableSteps:
        if self._steps is not None and self._steps.optimizer is not self.optimizers[0]:
            self._flush()
            self._close()  # all graphs update with the optimizer that was replaced
        if self._steps is None:
            if self._evaluation is not None:
                self._evaluation.close()  # the training step's plan chooses the homes anew
            self._steps = self._new_steps(self._request)
        return self._steps

    def _new_steps(self, request: PlanRequest) -> MovableSteps:
        module, optimizer = self._module, self.optimizers[0]
        return MovableSteps(module, optimizer, request, self._meter, self._ranks(), self._audit)

    def _ranks(self) -> Ranks | None:
        """The processes that average their gradients, if there are several."""
        return None

    @property
    def _expected(self) -> ExpectedStep | None:
        """The graph's results, if plain Lightning makes this micro-batch too."""
        return self._first_steps.expected

    # ---- evaluation ------------------------------------------------------------------------------

    def _run_evaluation(
        self, kind: str, eager: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._flush()
        if self._eager or kwargs:  # Lightning gives no kwargs, so somebody else calls
            return eager(*args, **kwargs)
        if self._evaluation is None:
            self._evaluation = Evaluation(
                self._module,
                self._request,
                lambda: self._steps and self._steps.runner,
                self._budget_bytes,
            )
        output = self._evaluation.step(kind, eager, *args)
        if self._module.trainer.state.fn != TrainerFn.FITTING:
            self._plan = self._evaluation.plan
        return output

    # ---- without a plan --------------------------------------------------------------------------

    def _without_plan(self, error: CaptureError, *args: Any, **kwargs: Any) -> Any:
        """Train eagerly from this batch on, which cannot be captured; refuse if there is a
        budget."""
        mistake = user_error(error)
        if self._request.budget is not None and mistake is not None:
            raise mistake
        self._request.check_eager(str(error))
        if self._groups is not None:
            self._groups.flush()
        if self._steps is not None:
            self._steps.give_gradients()
        self._first_steps.expected = None
        self._close()
        if mistake is None:
            self._go_eager(str(error))
            return super().training_step(*args, **kwargs)
        self._begin_eager()
        output = super().training_step(*args, **kwargs)  # this usually raises the user's own error
        self._go_eager(str(error))
        return output

    def _go_eager(self, why: str) -> None:
        self._request.check_eager(why)
        rank_zero_warn(f"OffloadStrategy trains eagerly, without offloading: {why}")
        self._begin_eager()

    def _begin_eager(self) -> None:
        self._eager = True
        self._close()
        self._all_on_device()

    def _all_on_device(self) -> None:
        """Move all tensors to the device, where plain Lightning has them."""
        if self.root_device.type != "cpu":
            move(tensors_of(self._module, self.optimizers), self.root_device)
            tell(self._module, self.root_device)

    # ---- the device and its memory ---------------------------------------------------------------

    def find_target(self) -> Target:
        """Return the trainer's device and the engine for it. Raise `OffloadError` if there is
        none."""
        engine, host_dir = self._request.engine, self._request.host_dir
        return target_of(engine, self.accelerator, self.root_device, host_dir)

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
            if isinstance(error, torch.OutOfMemoryError) and self._expected is not None:
                error.add_note(
                    "plain Lightning's step ran out of memory: it is made beside the plan to be"
                    " compared with it. check_first_steps=0 leaves the comparison out"
                )
            self._lost = self._lost or device_lost(error, self.root_device)
            if self._lost is None or self._lost is error:
                raise
            raise self._lost from error

    def _check_not_lost(self) -> None:
        """Raise `DeviceLost` if the device is lost, and the weights on it with it."""
        if self._lost is not None:
            raise self._lost

    def _flush(self) -> None:
        """Run all that is deferred, because somebody is going to read the weights."""
        with self._device_loss_noted(), self._interrupt.held():
            if self._groups is not None:
                self._groups.flush()
            if self._steps is not None:
                self._steps.late_updates.flush()

    def _close(self) -> None:
        """Close all runners, which gives the tensors memory of their own."""
        self._silence.end()
        if self._lost is not None:
            self._abandon()
            return
        self._first_steps.bring_home()
        evaluation, self._evaluation = self._evaluation, None
        steps, self._steps, self._groups = self._steps, None, None
        if steps is not None and steps.plan is not None:
            self._budget_bytes = next(iter(steps.plan.budget.values()), None)
        try:
            if evaluation is not None:
                evaluation.close()
        finally:
            if steps is not None:
                steps.close()

    def _abandon(self) -> None:
        """Drop all runners without touching the device, which is lost."""
        evaluation, self._evaluation = self._evaluation, None
        steps, self._steps, self._groups = self._steps, None, None
        if evaluation is not None:
            evaluation.abandon()
        if steps is not None:
            steps.abandon()
