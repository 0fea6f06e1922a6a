"""The graphs of a fit whose training step optimizes by hand: one graph is a whole `training_step`.

    before a step    .grad is None, or the sum of the parameter       what others put there is taken
    the graph        begins with the sums, and ends with them         offload/tracing/manual.py
    after it         .grad is the sum, or None if the step cleared it

So whoever reads or clears gradients between two steps does to the sums what they do in plain
Lightning. Where parameter and sum lie on different devices, `.grad` cannot be the sum: it is NaN.
"""

from collections.abc import Sequence
from typing import Any

import torch

from offload import Plan, TaskGraph
from offload.optimizer.fixed_settings import fixed_settings
from offload.program.assumptions import Number
from offload.tracing.manual import ManualStep, capture_manual_step, retraced_manual_step
from offload.tracing.questions import AssumedValues
from offload.tracing.training import Parameter
from trainers.offloading.steps.graph_cache import shapes_of
from trainers.offloading.steps.graph_validity import GraphValidity, Retraced
from trainers.offloading.steps.micro_batch import MicroBatch, StepGraph, outside
from trainers.offloading.steps.movable_steps import MovableSteps
from trainers.offloading.tracing.batch_parts import BatchParts
from trainers.offloading.tracing.closure import StepArguments
from trainers.offloading.tracing.hooks import Hooks
from trainers.offloading.tracing.manual_forward import ManualForward

Held = frozenset[Parameter]


class ManualSteps(MovableSteps):
    """One version of the steps. Their optimizers are all of the trainer's."""

    by_hand = True
    _marks: dict[Parameter, torch.Tensor]
    """By parameter: what is in `.grad` where the sum itself cannot be."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizers = tuple(self._module.trainer.optimizers)
        self._marks = {}

    # ---- gradients between two steps ------------------------------------------------------------

    def parameters(self) -> dict[Parameter, str]:
        """Return all parameters that may have a gradient, with their names."""
        found = {p: name for name, p in self._module.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for n, p in enumerate(group["params"]):
                    found.setdefault(p, f"optimizer{number}.parameter{n}")
        return found

    def _begin(self, micro: MicroBatch) -> None:
        self.held = self._taken()

    def _taken(self) -> Held:
        """Take what is in `.grad` now as the sums with which the next step begins."""
        held: set[Parameter] = set()
        for p in self.parameters():
            gradient = p.grad
            if gradient is None:
                continue
            total = self.sums.get(p)
            if gradient is not total and gradient is not self._marks.get(p):
                if total is None:
                    total = torch.zeros_like(p, memory_format=torch.preserve_format)
                    self.sums[p] = total = total.detach()
                with torch.no_grad():
                    total.copy_(gradient)
            held.add(p)
        return frozenset(held)

    def hold(self, held: Held) -> None:
        self.held = held
        self._marks.clear()
        for p in self.parameters():
            p.grad = self._shown(p) if p in held else None

    def _shown(self, p: Parameter) -> torch.Tensor:
        total = self.sums[p]
        if total.device != p.device:
            alone = torch.full((), float("nan"), dtype=p.dtype, device=p.device)
            total = self._marks[p] = alone.expand(p.size())
        return total

    def pass_over(self, step: StepGraph) -> None:
        self.hold(step.holds)

    def close(self) -> None:
        super().close()
        self._give_marked()

    def _let_go(self) -> None:
        super()._let_go()
        self._give_marked()

    def _give_marked(self) -> None:
        """Have `.grad` be the sum again, where the parameter is now: no step comes here any
        more."""
        for p in self.held:
            total = self.sums[p]
            if p.grad is self._marks.pop(p, total):
                p.grad = total.to(p.device)

    # ---- graphs ---------------------------------------------------------------------------------

    def _key(self, micro: MicroBatch, parts: BatchParts) -> tuple[Any, ...]:
        return (
            *super()._key(micro, parts),
            tuple([p.requires_grad for p in self.parameters()]),
            tuple([fixed_settings(optimizer) for optimizer in self.optimizers]),
        )

    def _first_plan(self, whole: TaskGraph) -> Plan:
        plan = self._request.plan(whole)
        self._note_waiting(plan)
        return plan

    def _traced_once(
        self, micro: MicroBatch, parts: BatchParts, last: bool, held: Held
    ) -> StepGraph:
        forward, step = self._manual_step(micro, parts, held)
        with torch.enable_grad(), self._request.target.held():
            graph = capture_manual_step(
                step,
                *parts.tensors,
                device=self._request.target.device,
                reads=forward.reads,
                learned=self._learned,
                assumed=AssumedValues(self.answers.for_capture()),
            )
        self._unwatched.say(forward.reads)
        return StepGraph(
            GraphValidity(forward.recipe(), graph.program.sketch),
            frozenset(step.left),
            last,
            (),
            outside(graph, self._module, self.sums),
            graph,
            (shapes_of(parts.key), micro.part),
        )

    def _retraced_once(
        self, micro: MicroBatch, parts: BatchParts, assumed: Sequence[Number]
    ) -> Retraced:
        forward, step = self._manual_step(micro, parts, self.held)
        with torch.enable_grad(), self._request.target.held():
            sketch = retraced_manual_step(
                step,
                *parts.tensors,
                device=self._request.target.device,
                reads=forward.reads,
                learned=self._learned,
                assumed=AssumedValues(assumed),
            )
        return Retraced(sketch, forward.recipe())

    def _manual_step(
        self, micro: MicroBatch, parts: BatchParts, held: Held
    ) -> tuple[ManualForward, ManualStep]:
        hooks = Hooks(self._module, self.optimizer)
        given = StepArguments("training_step", parts, micro.batch_idx, (), self._traits)
        forward = ManualForward(self._module, given, hooks)
        step = ManualStep(
            forward, self.optimizers, self.parameters(), hooks.reaches(), self.sums, held
        )
        return forward, step
