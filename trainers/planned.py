"""Trains a LightningModule that does not fit, within a byte budget, with the bits that it had.

    Trainer.fit --> training_step(batch)   the graph of this batch: forward, backward, accumulation,
                                           clipping, update; then self.log and metrics, for real
                    backward               nothing: it is done
                    optimizer_step         the closure, and nothing more

One graph a situation: shapes of the batch, first, middle or last micro-batch, python values that
the step reads, what requires a gradient. All run over the same tensors in one runner, which gives
them memory of their own again at the end of the fit. What cannot be planned is told (fallback.py).

Validation, test and prediction are graphs too (evaluation.py); a step of theirs that cannot be
captured runs on the weights where they are, in host memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from offload import CaptureError, DeviceLost, OffloadError, Plan
from offload.lost import device_lost
from offload.ranks import Ranks
from trainers.check import Expected
from trainers.closure import Batch
from trainers.devices import forget_results, keep_on_host, move, tell, tensors_of
from trainers.evaluation import Evaluation
from trainers.fallback import reason, user_error
from trainers.first_steps import FirstSteps
from trainers.groups import Groups
from trainers.hooks import Silence
from trainers.interrupt import Interrupt
from trainers.measured import MeasuredPlan, Meter, Spent
from trainers.steps import Asked, Micro, Step, Steps
from trainers.target import MakeDriver, Target, check_engine, target_of


class Planned(Strategy):
    """What an offloading strategy adds to the strategy that it is one of."""

    def __init__(
        self,
        budget: str | int | None = None,
        host_budget: str | int | None = None,
        recompute: str = "auto",
        optimizer: str = "auto",
        engine: str = "auto",
        verify: bool = True,
        check_first_steps: int = 2,
        **more: Any,
    ) -> None:
        """`budget`: bytes, a size (8GiB), a share of what the step needs un-offloaded (80%), or
        None: as much as it needs. A run that cannot be planned is trained eagerly if it is None,
        and refused if it is not. `check_first_steps`: so many optimizer steps are made by plain
        Lightning too, and a difference stops the run; they need the memory of both.
        `more`: of the plain strategy."""
        super().__init__(**more)
        self._has_device = "device" in more
        """Not the trainer's to choose."""
        self._asked = Asked(budget, host_budget, recompute, optimizer, engine, verify)
        if type(check_first_steps) is not int or check_first_steps < 0:
            raise ValueError(
                f"check_first_steps={check_first_steps!r}: a number of steps is needed"
            )
        if self._driver is None:
            check_engine(engine)
        self._check_first_steps = check_first_steps
        self._lost: DeviceLost | None = None
        self._steps: Steps | None = None
        self._groups: Groups | None = None
        self._silence = Silence()
        self._interrupt = Interrupt()
        self._evaluation: Evaluation | None = None
        self._bytes: int | None = None
        """The budget of the last fit."""
        self._begin()

    def _begin(self) -> None:
        """As before a fit."""
        self._eager = False
        self._decided = False
        self._first_steps = FirstSteps(self._check_first_steps)
        self._plan: Plan | None = None
        self._micro_batches = ""
        """How several of an optimizer step are run, and why."""
        self._meter = Meter()

    # ---- what a user asks -----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Of a whole step with its update, or of an evaluation step where nothing is trained;
        there after the first batch."""
        if self._plan is None:
            why = "this run trains eagerly" if self._eager else "the first batch makes it"
            raise OffloadError(f"there is no plan: {why}")
        return self._plan

    def explain(self) -> str:
        """One screen about the plan."""
        return "\n".join(filter(None, (self.plan.explain(), self._micro_batches)))

    @property
    def spent(self) -> Spent:
        """What the planned steps of this fit took so far, and for how long they waited."""
        return self._meter.spent

    @property
    def plans(self) -> tuple[MeasuredPlan, ...]:
        """Those that ran, and what their runs took."""
        return self._meter.plans

    def plan_for(self, batch: Any, batch_idx: int = 0) -> Plan | None:
        """Of the step on such a batch, as a fit would make it; nothing is run. None: the fit would
        train eagerly. To be called where a step is about to begin: from `on_train_batch_start`."""
        if not self._planned():
            return None
        takes_index = is_param_in_hook_signature(
            self._module.training_step, "batch_idx", min_args=2
        )
        micro = self._micro(batch, batch_idx if takes_index else None)
        try:
            return self._begun().plan_for(micro, Batch.of(batch))
        except CaptureError as error:
            if mistake := user_error(error):
                raise mistake from None
            self._go_eager(str(error))
            return None

    @property
    def target(self) -> Target:
        """Where the steps of the last run were made."""
        return self._asked.target

    # ---- what Lightning calls -------------------------------------------------------------------

    def setup_environment(self) -> None:
        target = self.find_target()
        super().setup_environment()
        before = self._asked.target
        if target.device == before.device:
            target = replace(target, costs=before.costs)
        self._asked = replace(self._asked, target=target.measured(self.precision_plugin))

    def find_target(self) -> Target:
        """The trainer's device, and the engine that runs there. Raise `OffloadError` where none
        does."""
        return target_of(self._asked.engine, self.accelerator, self.root_device, self._driver)

    def model_to_device(self) -> None:
        """To the GPU only as far as the plan says so, at the first step."""
        if self.root_device.type == "cpu":
            super().model_to_device()
        else:
            keep_on_host(self._module, self.root_device)

    def setup(self, trainer: L.Trainer) -> None:
        self._close()
        self._lost = None
        super().setup(trainer)
        self._eager = False
        if trainer.state.fn == TrainerFn.FITTING:
            self._begin()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._watched():
            return self._training_step(*args, **kwargs)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._planned():
            return super().training_step(*args, **kwargs)
        micro = self._micro(*args)
        try:
            output = self._run(micro)
        except CaptureError as error:
            return self._without_plan(error, *args, **kwargs)
        if self._expected is None:
            return output
        eager = super().training_step(*args, **kwargs)
        self._first_steps.compare_loss(eager)
        return eager

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._silence.end()
        if self._planned() and self._expected is None:
            return closure_loss
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._first_steps.compare_gradients(self._module, self._steps)
        return loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if not self._planned():
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = closure()
        if not self._eager and self._expected is None:
            return result
        # The gradients are in .grad, as always, and the closure was called.
        result = super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        self._first_steps.compare_state(self._module)
        return result

    @property
    def _expected(self) -> Expected | None:
        """Plain Lightning makes this micro-batch too."""
        return self._first_steps.expected

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._check_there()
        self._flush()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_there()
        self._flush()
        return super().optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Each state stays beside its parameter: on the host, before there is a plan."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
        if self._eager:
            self._all_on_device()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._check_there()
        super().save_checkpoint(*args, **kwargs)

    def _flush(self) -> None:
        """Somebody looks at the weights."""
        with self._watched(), self._interrupt.held():
            if self._groups is not None:
                self._groups.flush()
            if self._steps is not None:
                self._steps.waiting.flush()

    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        self._interrupt.deliver()
        return super().batch_to_device(*args, **kwargs)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._flush()  # a run that was stopped between two micro-batches
        self._interrupt.deliver()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, *args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._lost = self._lost or device_lost(exception, self.root_device)
        self._close()

    def teardown(self) -> None:
        self._close()
        if self._lost is None:
            super().teardown()
        else:  # nothing can be moved from there, and Lightning would
            forget_results(self._module.trainer)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Around what runs on the device."""
        try:
            yield
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and self._expected is not None:
                error.add_note(
                    "this was plain Lightning's own step, which the first steps are compared with"
                    " beside the plan: check_first_steps=0 leaves it out"
                )
            self._lost = self._lost or device_lost(error, self.root_device)
            if self._lost is None or self._lost is error:
                raise
            raise self._lost from error

    def _check_there(self) -> None:
        """Raise where the values that are asked for are lost."""
        if self._lost is not None:
            raise self._lost

    def _close(self) -> None:
        """Memory of their own for all tensors."""
        self._silence.end()
        if self._lost is not None:
            self._abandon()
            return
        self._first_steps.go_home()
        evaluation, self._evaluation = self._evaluation, None
        steps, self._steps, self._groups = self._steps, None, None
        if steps is not None and steps.plan is not None:
            self._bytes = next(iter(steps.plan.budget.values()), None)
        try:
            if evaluation is not None:
                evaluation.close()
        finally:
            if steps is not None:
                steps.close()

    def _abandon(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        steps, self._steps, self._groups = self._steps, None, None
        if evaluation is not None:
            evaluation.abandon()
        if steps is not None:
            steps.abandon()

    # ---- without training -----------------------------------------------------------------------

    def _evaluate(self, kind: str, eager: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._watched():
            return self._evaluated(kind, eager, *args, **kwargs)

    def _evaluated(self, kind: str, eager: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._flush()
        if self._eager or kwargs:  # Lightning gives none
            return eager(*args, **kwargs)
        if self._evaluation is None:
            asked = self._asked
            if self._bytes is not None:  # a share is one of the training step
                asked = replace(asked, budget=self._bytes)
            self._evaluation = Evaluation(
                self._module, asked, lambda: self._steps and self._steps.runner
            )
        output = self._evaluation.step(kind, eager, *args)
        if self._module.trainer.state.fn != TrainerFn.FITTING:
            self._plan = self._evaluation.plan
        return output

    # ---- one step -------------------------------------------------------------------------------

    @property
    def _driver(self) -> MakeDriver | None:
        """For tests: what drives the device in the place of CUDA's streams."""
        return None

    @property
    def _module(self) -> L.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _begun(self) -> Steps:
        if self._steps is None:
            if self._evaluation is not None:
                self._evaluation.close()  # so that homes are where training wants them
            self._steps = Steps(
                self._module, self.optimizers[0], self._asked, self._meter, self._ranks()
            )
        return self._steps

    def _planned(self) -> bool:
        if self._eager:
            return False
        trainer = self._module.trainer
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        if trainer.state.fn != TrainerFn.FITTING or loop._skip_backward:
            return False
        if not self._decided:
            if why := self._why_not():
                self._go_eager(why)
            self._decided = True
        return not self._eager

    def _why_not(self) -> str:
        """Empty: this run can be planned, as far as one sees."""
        return reason(self._module.trainer, self._module)

    def _ranks(self) -> Ranks | None:
        """The processes that train together."""
        return None

    def _micro(self, batch: Any, batch_idx: int | None = None) -> Micro:
        trainer = self._module.trainer
        loop = trainer.fit_loop.epoch_loop
        return Micro(
            batch,
            batch_idx,
            # As Lightning decides whether to set the gradients to zero, and whether to step.
            first=loop.batch_idx % trainer.accumulate_grad_batches == 0,
            last=not trainer.fit_loop._should_accumulate(),
        )

    def _run(self, micro: Micro) -> Any:
        steps = self._begun()
        if micro.first:
            self._first_steps.begin(self.optimizers[0].zero_grad)
        with self._interrupt.held():
            if self._first_steps.due:
                parts, step = self._captured(micro)
                self._plan = steps.plan
                if self._first_steps.possible(self.plan, self._asked.target):
                    target = self._asked.target
                    self._first_steps.run(steps, step, parts, self._module, target)
                    return None
            return self._run_planned(micro, steps)

    def _run_planned(self, micro: Micro, steps: Steps) -> Any:
        context = self.precision_plugin.train_step_context
        if self._groups is None:
            self._groups = Groups(steps, self._module, context)
        output = self._groups.take(micro)
        if output is None:
            parts, step = self._captured(micro)
            outputs = steps.run(step, parts, wait=True)
            output = step.recipe.serve(outputs, parts.tensors, context)
            self._silence.begin(step.zeroed)
        self._groups.leave()
        self._plan = steps.plan
        self._micro_batches = self._groups.said and f"micro-batches {self._groups.said}"
        return output

    def _captured(self, micro: Micro) -> tuple[Batch, Step]:
        assert self._steps is not None
        parts = Batch.of(micro.batch)
        return parts, self._steps.step_for(micro, parts)

    def _without_plan(self, error: CaptureError, *args: Any, **kwargs: Any) -> Any:
        """A batch that cannot be captured, be it the first or a later one."""
        mistake = user_error(error)
        if self._asked.budget is not None and mistake is not None:
            raise mistake
        self._check_budget(str(error))
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
        output = super().training_step(*args, **kwargs)  # which makes the same mistake, as a rule
        self._go_eager(str(error))
        return output

    def _go_eager(self, why: str) -> None:
        self._check_budget(why)
        rank_zero_warn(f"OffloadStrategy trains eagerly, without offloading: {why}")
        self._begin_eager()

    def _begin_eager(self) -> None:
        self._eager = True
        self._close()
        self._all_on_device()

    def _all_on_device(self) -> None:
        """As plain Lightning has them."""
        if self.root_device.type != "cpu":
            move(tensors_of(self._module, self.optimizers), self.root_device)
            tell(self._module, self.root_device)

    def _check_budget(self, why: str) -> None:
        if self._asked.budget is not None:
            raise CaptureError(
                f"OffloadStrategy(budget={self._asked.budget!r}): this run cannot be planned:"
                f" {why}. Without a plan no budget can be kept: change what is named, or give"
                " budget=None to train without offloading"
            )
