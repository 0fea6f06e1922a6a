"""All micro-batches of an optimizer step in one graph: a weight comes in once for all of them.

    batch 1   kept aside         batch 2   kept aside         batch 3   one graph for the three,
              nothing is run               nothing is run               then what each of them logs

The graphs of the micro-batches are put together (offload's lowering/micro_batches.py) as soon as
each was captured by itself, if that is the faster way by the simulator. What comes in between (a
batch of another shape, a checkpoint) has those that are kept aside run first, one by one.

Nobody may see the difference. So it is not done where somebody may look, validate or stop between
two micro-batches, or draws random numbers there and the step draws some, too.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils import _pytree as pytree

import offload
from offload import MemoryTooSmall, OffloadError, Plan
from offload.account import say_seconds
from offload.lowering import in_turn
from offload.memgraph import RELOAD
from trainers.closure import Batch
from trainers.generators import drawn_by_steps
from trainers.onlookers import onlooker
from trainers.steps import Micro, Step, Steps

FASTER = 0.98
"""Of the time that the micro-batches take one by one: what all of them together must reach."""
MOST = 4
"""Groups that are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """A micro-batch that is kept aside."""

    micro: Micro
    parts: Batch
    step: Step
    first_loop: Any
    """Lightning's note on whether this is the first batch of the epoch."""


class Groups:
    """Of one fit."""

    def __init__(self, steps: Steps, module: L.LightningModule, context: Callable[[], Any]) -> None:
        """`context`: around what a step logs."""
        self.said = ""
        """What became of it, in a line."""
        self._steps = steps
        self._module = module
        self._context = context
        self._taken: list[Taken] = []
        self._taking = False
        self._never = ""
        """Why no micro-batch is ever kept aside; it does not change in a fit."""
        self._decided = False
        self._settled = False
        self._groups: OrderedDict[tuple[Step, ...], bool] = OrderedDict()
        """Whether these run together."""
        self._random: torch.Tensor | None = None
        self._disturbed = False
        """Whether random numbers are drawn between micro-batches."""

    # ---- what the strategy calls ----------------------------------------------------------------

    def take(self, micro: Micro) -> Any:
        """What `training_step` returns if the micro-batch was taken; None: it is to be run."""
        self._look_at_random(micro)
        if micro.first:
            self.flush()
            self._taking = not micro.last and not self._why_not()
        if not self._taking:
            return None
        parts = Batch.of(micro.batch)
        step = self._steps.known(micro, parts)
        ends = self._module.trainer.should_stop  # and the epoch with it, before the step
        if step is None or ends or self._would_disturb(step):
            self.flush()
            return None
        own = replace(parts, tensors=tuple(tensor.clone() for tensor in parts.tensors))
        first_loop = self._module.trainer._logger_connector._first_loop_iter
        self._taken.append(Taken(micro, own, step, first_loop))
        self._steps.pass_over(step)
        if not micro.last:
            return torch.tensor(torch.nan)  # nobody looks
        return self._run_all()

    def leave(self) -> None:
        """After every micro-batch."""
        if self._module.trainer.accumulate_grad_batches > 1:
            self._random = drawn_by_steps(self._module.trainer.strategy.root_device)

    def flush(self) -> None:
        """Those that are kept aside are run now, one by one, and so are the others of the step."""
        self._taking = False
        if self._taken:
            self._run_each()
            self.leave()

    # ---- whether --------------------------------------------------------------------------------

    def _why_not(self) -> str:
        if not self._decided:
            self._decided = True
            self._never = _in_between(self._module.trainer, self._module)
            if self._never:
                self.said = f"one by one: {self._never}"
        return self._never

    def _would_disturb(self, step: Step) -> bool:
        if not self._disturbed or not _draws(step):
            return False
        self.said = "one by one: the step draws random numbers, and so does who loads the batches"
        return True

    def _look_at_random(self, micro: Micro) -> None:
        if micro.first or self._random is None or self._disturbed:
            return
        now = drawn_by_steps(self._module.trainer.strategy.root_device)
        if torch.equal(self._random, now):
            return
        self._disturbed = True
        if any(_draws(taken.step) for taken in self._taken):
            rank_zero_warn(
                "random numbers were drawn between two micro-batches (by the loader, say), for the"
                " first time in this run: in this optimizer step the batches have got those that"
                " the module would have drawn. From now on every micro-batch is run when it comes"
            )

    def _together(self, taken: Sequence[Taken]) -> bool:
        key = tuple(one.step for one in taken)
        if key not in self._groups:
            with self._steps.planning():
                self._groups[key] = self._join(key)
            while len(self._groups) > MOST:
                self._steps.forget(self._groups.popitem(last=False)[0])
        self._groups.move_to_end(key)
        return self._groups[key]

    def _join(self, key: tuple[Step, ...]) -> bool:
        """Whether one graph for these is the faster way; then it is in the runner."""
        alone = [self._steps.plan_of(step) for step in key]
        if not any(map(_streams, alone)):
            self._never = "all weights are resident"
            self.said = f"one by one: {self._never}"
            return False
        seconds = sum(plan.predicted_seconds for plan in alone)
        inputs, part = key[0].about[0], f"{len(key)} micro-batches"
        try:
            graph = in_turn([step.graph for step in key])
            if self._settled:
                plan = self._steps.add(key, graph, inputs, part)
            else:
                plan = _planned_like(alone[-1], graph)
        except OffloadError as error:
            return self._refused(key, f"together: {error}")
        took = f"{say_seconds(plan.predicted_seconds)} predicted, {say_seconds(seconds)} one by one"
        if plan.predicted_seconds > FASTER * seconds:
            return self._refused(key, f"together {took}")
        if not self._settled:
            try:
                self._steps.settle_as(key, plan, inputs, part)
            except MemoryTooSmall as error:  # for what waits on the host
                return self._refused(key, f"together: {error}")
            self._settled = True
        self.said = f"{len(key)} at a time: {took}"
        return True

    def _refused(self, key: tuple[Step, ...], why: str) -> bool:
        self._steps.forget(key)
        if not self._settled:
            self._never = why
            self.said = f"one by one: {why}"
        return False

    # ---- running them ---------------------------------------------------------------------------

    def _run_all(self) -> Any:
        if not self._together(self._taken):
            return self._run_each()
        taken, self._taken = self._taken, []
        tensors = [tensor for one in taken for tensor in one.parts.tensors]
        outputs = list(self._steps.run_as(tuple(one.step for one in taken), tensors))
        self._steps.pass_over(taken[-1].step)
        result: Any = None
        for one in taken:
            count = len(pytree.tree_leaves(one.step.graph.program.outputs))
            (_, *own), outputs = outputs[:count], outputs[count:]
            result = self._serve(one, own)
        return result

    def _run_each(self) -> Any:
        taken, self._taken = self._taken, []
        result: Any = None
        for one in taken:
            result = self._serve(one, self._steps.run(one.step, one.parts))
        return result

    def _serve(self, one: Taken, outputs: Sequence[Any]) -> Any:
        with self._as_then(one), torch.enable_grad():
            return one.step.recipe.serve(outputs, one.parts.tensors, self._context)

    @contextmanager
    def _as_then(self, one: Taken) -> Iterator[None]:
        """What Lightning knew when this micro-batch came."""
        connector: Any = self._module.trainer._logger_connector
        results: Any = self._module.trainer.fit_loop.epoch_loop._results
        module: Any = self._module
        now = results.batch, results.batch_size, connector._first_loop_iter
        function = module._current_fx_name
        results.batch, results.batch_size = one.micro.batch, None
        connector._first_loop_iter = one.first_loop
        module._current_fx_name = "training_step"
        try:
            yield
        finally:
            results.batch, results.batch_size, connector._first_loop_iter = now
            module._current_fx_name = function


def _in_between(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Who may look, validate or stop between two micro-batches."""
    if who := onlooker(trainer, module):
        return who
    if trainer.world_size > 1:
        return f"there are {trainer.world_size} ranks"
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    if any(isinstance(one, Timer) and one._interval == "step" for one in callbacks):
        return "a Timer may stop the run between two micro-batches (interval='epoch' does not)"
    return _validates(trainer)


def _validates(trainer: L.Trainer) -> str:
    every, count = trainer.val_check_batch, trainer.accumulate_grad_batches
    if not trainer.enable_validation or every == float("inf"):
        return ""
    batches = trainer.num_training_batches
    by_epoch = trainer.check_val_every_n_epoch is not None
    if every is None or getattr(trainer, "_val_check_time_interval", None) is not None:
        return "validation is due by the clock, between two micro-batches as it comes"
    if every % count == 0 and (by_epoch or batches % count == 0):
        return ""
    if by_epoch and every >= batches:
        return ""
    return f"validation every {every} batches comes between two of {count} micro-batches"


def _draws(step: Step) -> bool:
    return any(task.random for task in step.graph.tasks)


def _streams(plan: Plan) -> bool:
    """Whether weights come in."""
    buffers, nodes = plan.graph.buffers, plan.memgraph.nodes
    return any(node.kind == RELOAD and buffers[node.buffer].persistent for node in nodes)


def _planned_like(plan: Plan, graph: offload.TaskGraph) -> Plan:
    """With the same bytes, and no tensor at home anywhere yet."""
    limits = {device: limit for device, limit in plan.budget.items() if limit is not None}
    return offload.plan(
        graph,
        limits or None,
        plan.costs,
        plan.host_budget,
        placement=plan.placement,
        recompute=plan.recompute,
        optimizer=plan.optimizer,
        proven=plan.proven,
    )
