"""All micro-batches of an optimizer step in one graph, so that a weight is copied in once for all.

    batch 1   held               batch 2   held               batch 3   one graph runs them,
              nothing runs                 nothing runs                 then the log calls are made

The graphs of the micro-batches are joined (offload/lowering/micro_batches.py) once each was
captured by itself, if the simulator says that this is faster. If something else comes in between (a
batch of another shape, a checkpoint), the held micro-batches run first, one by one.

Nobody may notice the difference. So micro-batches are not joined if somebody may observe, validate
or stop the run between two of them, or if both the step and the loader draw random numbers.
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

import offload
from offload import MemoryTooSmall, OffloadError, Plan
from offload.graph.memgraph import RELOAD
from offload.lowering.passes import in_turn
from offload.planning.account import say_seconds
from offload.torch_seams import pytree
from trainers.lightning_seams import (
    first_batch,
    looks_at_every_step,
    results,
    swap_first_batch,
    swap_hook_name,
    validates_by_clock,
)
from trainers.offloading.hardware.generators import drawn_by_steps, generators_of
from trainers.offloading.observers.weight_readers import onlooker
from trainers.offloading.steps.micro_batch import MicroBatch, StepGraph
from trainers.offloading.steps.step_graphs import StepGraphs
from trainers.offloading.tracing.batch_parts import BatchParts

FASTER = 0.98
"""A joined graph is used if it takes at most this share of the time of its parts one by one."""
MOST = 4
"""So many joined graphs are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldMicroBatch:
    """A micro-batch that Lightning believes done, but that has not run yet."""

    micro: MicroBatch
    parts: BatchParts
    step: StepGraph
    first_loop: Any
    """Lightning's note whether this is the first batch of the epoch."""


class Groups:
    """Holds the micro-batches of one fit, and runs those of an optimizer step together."""

    def __init__(
        self, steps: StepGraphs, module: L.LightningModule, context: Callable[[], Any]
    ) -> None:
        """`context` makes the context in which the log calls of a step are made."""
        self.summary = ""
        """One line that says how micro-batches run, and why."""
        self._steps = steps
        self._module = module
        self._context = context
        self._held: list[HeldMicroBatch] = []
        self._holding = False
        self._why_never = ""
        """Why no micro-batch is held in this fit; empty if they may be."""
        self._decided = False
        self._settled = False
        self._groups: OrderedDict[tuple[StepGraph, ...], bool] = OrderedDict()
        """Whether the micro-batches of such steps run together."""
        self._random: torch.Tensor | None = None
        self._disturbed = False
        """Whether random numbers are drawn between micro-batches."""

    # ---- what the strategy calls ----------------------------------------------------------------

    def take(self, micro: MicroBatch) -> Any:
        """Return what `training_step` shall return if the micro-batch was taken, or None if the
        caller must run it."""
        self._look_at_random(micro)
        if micro.first:
            self.flush()
            self._holding = not micro.last and not self._why_not()
        if not self._holding:
            return None
        parts = BatchParts.of(micro.batch)
        step = self._steps.known(micro, parts)
        ends = self._module.trainer.should_stop  # then the epoch ends before the optimizer steps
        if step is None or ends or self._would_disturb(step):
            self.flush()
            return None
        own = replace(parts, tensors=tuple(tensor.clone() for tensor in parts.tensors))
        first_loop = first_batch(self._module.trainer)
        self._held.append(HeldMicroBatch(micro, own, step, first_loop))
        self._steps.pass_over(step)
        if not micro.last:
            return torch.tensor(torch.nan)  # nobody reads this loss
        return self._run_all()

    def leave(self) -> None:
        """Note the random generator's state at the end of every micro-batch."""
        if self._module.trainer.accumulate_grad_batches > 1:
            self._random = drawn_by_steps(self._module.trainer.strategy.root_device)

    def flush(self) -> None:
        """Run the held micro-batches one by one; the others of this step follow in that way."""
        self._holding = False
        if self._held:
            self._run_each()
            self.leave()

    # ---- whether micro-batches run together -----------------------------------------------------

    def _why_not(self) -> str:
        if not self._decided:
            self._decided = True
            self._why_never = _in_between(self._module.trainer, self._module)
            if self._why_never:
                self.summary = f"one by one: {self._why_never}"
        return self._why_never

    def _would_disturb(self, step: StepGraph) -> bool:
        if step.assumed:  # a check that fails in a later one would come after the sums of this one
            self.summary = "one by one: the step checks values"
            return True
        if generators_of(step.graph):  # whose state between two micro-batches is not looked at
            self.summary = "one by one: the step draws from a torch.Generator of its own"
            return True
        if not self._disturbed or not _draws(step):
            return False
        self.summary = "one by one: the step and the loader both draw random numbers"
        return True

    def _look_at_random(self, micro: MicroBatch) -> None:
        if micro.first or self._random is None or self._disturbed:
            return
        now = drawn_by_steps(self._module.trainer.strategy.root_device)
        if torch.equal(self._random, now):
            return
        self._disturbed = True
        if any(_draws(taken.step) for taken in self._held):
            rank_zero_warn(
                "random numbers were drawn between two micro-batches (by the loader, for example)"
                " for the first time in this run: the batches of this optimizer step got numbers"
                " that the module would have drawn in an eager run. From now on every micro-batch"
                " runs as soon as it arrives"
            )

    def _run_together(self, taken: Sequence[HeldMicroBatch]) -> bool:
        key = tuple(one.step for one in taken)
        if key not in self._groups:
            with self._steps.planning():
                self._groups[key] = self._join(key)
            while len(self._groups) > MOST:
                self._steps.forget(self._groups.popitem(last=False)[0])
        self._groups.move_to_end(key)
        return self._groups[key]

    def _join(self, key: tuple[StepGraph, ...]) -> bool:
        """Join these steps. If the joined graph is faster, add it to the runner and return True."""
        alone = [self._steps.plan_of(step) for step in key]
        if not any(map(_streams, alone)):
            self._why_never = "all weights are resident"
            self.summary = f"one by one: {self._why_never}"
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
            except MemoryTooSmall as error:  # the host has no room for what waits there
                return self._refused(key, f"together: {error}")
            self._settled = True
        self.summary = f"{len(key)} at a time: {took}"
        return True

    def _refused(self, key: tuple[StepGraph, ...], why: str) -> bool:
        self._steps.forget(key)
        if not self._settled:
            self._why_never = why
            self.summary = f"one by one: {why}"
        return False

    # ---- running them ---------------------------------------------------------------------------

    def _run_all(self) -> Any:
        if not self._run_together(self._held):
            return self._run_each()
        taken, self._held = self._held, []
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
        taken, self._held = self._held, []
        result: Any = None
        for one in taken:
            result = self._serve(one, self._steps.run(one.step, one.parts))
        return result

    def _serve(self, one: HeldMicroBatch, outputs: Sequence[Any]) -> Any:
        with self._state_of_then(one), torch.enable_grad():
            return one.step.recipe.serve(outputs, one.parts.given, self._context)

    @contextmanager
    def _state_of_then(self, one: HeldMicroBatch) -> Iterator[None]:
        """Give Lightning's loop the state that it had when this micro-batch arrived."""
        trainer = self._module.trainer
        logged = results(trainer.fit_loop.epoch_loop)
        now = logged.batch, logged.batch_size
        logged.batch, logged.batch_size = one.micro.batch, None
        first = swap_first_batch(trainer, one.first_loop)
        function = swap_hook_name(self._module, "training_step")
        try:
            yield
        finally:
            logged.batch, logged.batch_size = now
            swap_first_batch(trainer, first)
            swap_hook_name(self._module, function)


def _in_between(trainer: L.Trainer, module: L.LightningModule) -> str:
    """Say what may observe, validate or stop the run between two micro-batches; empty: nothing."""
    if who := onlooker(trainer, module):
        return who
    if trainer.world_size > 1:
        return f"there are {trainer.world_size} ranks, which average gradients in every step"
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    if any(isinstance(one, Timer) and looks_at_every_step(one) for one in callbacks):
        return "a Timer may stop the run between two micro-batches (interval='epoch' does not)"
    return _validates(trainer)


def _validates(trainer: L.Trainer) -> str:
    every, count = trainer.val_check_batch, trainer.accumulate_grad_batches
    if not trainer.enable_validation or every == float("inf"):
        return ""
    batches = trainer.num_training_batches
    by_epoch = trainer.check_val_every_n_epoch is not None
    if every is None or validates_by_clock(trainer):
        return "validation is due by the clock, which may be between two micro-batches"
    if every % count == 0 and (by_epoch or batches % count == 0):
        return ""
    if by_epoch and every >= batches:
        return ""
    return f"validation every {every} batches falls between two of {count} micro-batches"


def _draws(step: StepGraph) -> bool:
    return any(task.random for task in step.graph.tasks)


def _streams(plan: Plan) -> bool:
    """Whether this plan copies weights to the device."""
    buffers, nodes = plan.graph.buffers, plan.memgraph.nodes
    return any(node.kind == RELOAD and buffers[node.buffer].persistent for node in nodes)


def _planned_like(plan: Plan, graph: offload.TaskGraph) -> Plan:
    """Plan `graph` with the budget of `plan`, free to give every tensor another home."""
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
