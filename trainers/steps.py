"""The graphs of a run, one a situation, over the same tensors in one runner.

    batch, first / middle / last micro-batch, ...  --key-->  a step in the runner, or capture one

The first plan is that of a whole step, with the update: it knows all the tensors, and the steps
that are added leave them where it put them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

import offload
from offload import MemoryTooSmall, Plan, Runner, TaskGraph
from offload.capture import capture_step
from offload.ranks import Ranks
from offload.sizes import is_share, parse_share, parse_size
from offload.trace import Trace
from offload.training import Clip, Parameter, TrainingStep
from trainers.closure import Batch, Forward, Given, Recipe
from trainers.hooks import Hooks
from trainers.kept import Kept, shapes_of
from trainers.measured import Meter
from trainers.target import ENGINES, ON_CPU, Target
from trainers.waiting import Waiting

LOOKS = 4
"""Runs of the first plan that say whether it is the right one."""
RECOMPUTE = ("auto", "never")
OPTIMIZERS = ("auto", "device", "host")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants of every plan, and where it is to run."""

    budget: str | int | None = None
    host_budget: str | int | None = None
    recompute: str = "auto"
    optimizer: str = "auto"
    engine: str = "auto"
    verify: bool = True
    target: Target = ON_CPU

    def __post_init__(self) -> None:
        for name, given, known in (
            ("recompute", self.recompute, RECOMPUTE),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("engine", self.engine, ENGINES),
        ):
            if given not in known:
                raise ValueError(f"{name}={given!r}: one of {', '.join(known)} is needed")
        if self.budget is not None:
            _check("budget", parse_share if is_share(self.budget) else parse_size, self.budget)
        if self.host_budget is not None:
            _check("host_budget", parse_size, self.host_budget)

    def plan(self, graph: TaskGraph, late: bool = False) -> Plan:
        budget = self.budget
        if isinstance(budget, str) and is_share(budget):
            whole = offload.plan(graph, costs=self.target.costs, recompute=False)
            share = parse_share(budget)
            # Of what can leave: the libraries of a device keep the rest in any case.
            budget = math.ceil(whole.peak_bytes * share) + whole.reserve
            if share >= 1:  # nothing needs to move, but packed it may take a bit more
                budget = max(budget, whole.device_bytes)
        return offload.plan(
            graph,
            budget,
            self.target.costs,
            self.host_budget,
            recompute=self.recompute == "auto",
            optimizer=self.optimizer,
            proven=self.verify,
            late=late,
        )


def _check(name: str, parse: Callable[[Any], float], given: str | int) -> None:
    try:
        parse(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class Micro:
    """One call of `training_step`."""

    batch: Any
    batch_idx: int | None
    first: bool
    """Of those whose gradients are added up."""
    last: bool
    """The optimizer steps after it."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A graph in the runner, by itself as the key."""

    recipe: Recipe
    holds: frozenset[Parameter]
    """Whose gradients are added up after it."""
    last: bool
    zeroed: tuple[Any, ...]
    """Whose `on_before_zero_grad` is a part of it."""
    outside: Mapping[str, torch.Tensor]
    """What it changes that belongs to neither module nor optimizer: a callback's averages, say."""
    graph: TaskGraph
    about: tuple[str, str]
    """Shapes of its batch, and which part of an optimizer step it is."""


class Steps:
    """Of one fit."""

    def __init__(
        self,
        module: L.LightningModule,
        optimizer: Optimizer,
        asked: Asked,
        meter: Meter,
        ranks: Ranks | None = None,
    ) -> None:
        self.sums: dict[Parameter, torch.Tensor] = {}
        """Gradients of the micro-batches so far."""
        self.plan: Plan | None = None
        self._module = module
        self._optimizer = optimizer
        self._asked = asked
        self._meter = meter
        self._ranks = ranks
        self.runner: Runner | None = None
        """There after the first step was captured."""
        self.waiting = Waiting(module)
        self._plans: dict[Any, Plan] = {}
        """Of what is in the runner now."""
        self._kept: Kept[Step] = Kept("the step", self._forget)
        self._first_traces: list[Trace] | None = []
        """Of the first plan; None: it is not asked again."""
        self._held: frozenset[Parameter] = frozenset()
        self.just_held: frozenset[Parameter] = frozenset()
        """Whose sums are those of `.grad` in an eager run, after this micro-batch."""

    def known(self, micro: Micro, parts: Batch) -> Step | None:
        """The one that was captured for such a batch in such a situation."""
        if micro.first:
            self._held = frozenset()
        return self._kept.find(self._key(micro, parts))

    def step_for(self, micro: Micro, parts: Batch) -> Step:
        """That one, or capture it."""
        if (found := self.known(micro, parts)) is not None:
            return found
        key = self._key(micro, parts)
        self._kept.say_many(key, parts, self._module.current_epoch)
        self.waiting.flush()
        with self._meter.planning():
            step = self._capture(micro, parts)
        self._kept.put(key, step)
        return step

    def plan_for(self, micro: Micro, parts: Batch) -> Plan:
        """Of the whole step, as `step_for` would make it; nothing is run."""
        step = self._traced(micro, parts, micro.last, self._held)
        whole = self._whole(micro, parts, step)
        if self.plan is None:
            self.plan = found = self._first_plan(whole)
        else:
            found = self.plan.replan(whole)
        if not micro.last:
            self.plan.replan(step.graph)  # it must fit, too
        return found

    def run(self, step: Step, parts: Batch, wait: bool = False) -> Sequence[Any]:
        """What the step returns besides the loss that it minimizes. `wait`: updates may."""
        assert self.runner is not None
        if step not in self._plans:
            self.add(step, step.graph, *step.about)
        self.runner.measure(self._meter.looks(step))
        begun = self._meter.begin()
        _, *outputs = self.waiting.run(self.runner, step, *parts.tensors, wait=wait)
        self._meter.ran(step, begun, self.runner.trace)
        self._remake(step)
        self.pass_over(step)
        self.just_held = frozenset() if step.last else step.holds
        return outputs

    def run_as(self, key: Any, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What is in the runner by this key."""
        assert self.runner is not None
        self.waiting.flush()
        self.runner.measure(self._meter.looks(key))
        begun = self._meter.begin()
        outputs = self.runner.run(key, *tensors)
        self._meter.ran(key, begun, self.runner.trace)
        return outputs

    def pass_over(self, step: Step) -> None:
        """As if it had run: the next one adds its gradients to this one's."""
        self._held = step.holds

    # ---- other graphs over the same tensors -----------------------------------------------------

    def plan_of(self, step: Step) -> Plan:
        if step not in self._plans:
            self.add(step, step.graph, *step.about)
        return self._plans[step]

    def add(self, key: Any, graph: TaskGraph, inputs: str, part: str) -> Plan:
        """To the runner, by this key."""
        assert self.runner is not None
        plan = self.runner.add(key, graph)
        assert isinstance(plan, Plan)
        self._planned(key, plan, inputs, part)
        return plan

    def settle_as(self, key: Any, plan: Plan, inputs: str, part: str) -> None:
        """From now on all tensors are where this plan has them. Other steps are planned anew when
        they are needed. The old arenas go before the new ones come; and come back if these are
        refused."""
        assert self.plan is not None
        kept = {k: known for k, known in self._plans.items() if known is self.plan}
        self.close()
        self.runner = None
        self._plans.clear()
        try:
            self.runner = self._asked.target.runner(plan, key)
        except MemoryTooSmall:
            self.runner = self._asked.target.runner(self.plan, next(iter(kept), None))
            self._plans.update(kept)
            raise
        self.plan = plan
        self._planned(key, plan, inputs, part)

    def _remake(self, step: Step) -> None:
        """Once a fit, on a GPU: the first plan as its own first runs say, if that is a faster
        one. Not where updates wait for the next step: its three graphs are one plan. Of several
        micro-batches the first plan is none that runs."""
        trace = self.runner.trace if self.runner is not None else None
        plan = self._plans.get(step)
        if self._first_traces is None or trace is None or plan is None or plan is not self.plan:
            return
        if plan.rotation is not None or not self._asked.target.measures:
            self._first_traces = None
            return
        if not (trace.whole and trace.timed and trace.memgraph is plan.memgraph):
            return
        self._first_traces.append(trace)
        if len(self._first_traces) < LOOKS:
            return
        # The first run loads kernels, and says nothing of the others.
        traces, self._first_traces = self._first_traces[1:], None
        with self.planning():
            measured = plan.measured(traces)
            new = measured.remade()
            if new.memgraph is measured.memgraph:  # kept, and the runner with it
                self.plan = self._plans[step] = new
                self._meter.priced(step, new)
                return
            self._note_waiting(new)
            try:
                self.settle_as(step, new, *step.about)
            except MemoryTooSmall as error:
                rank_zero_warn(f"OffloadStrategy keeps its first plan: {error}")

    def planning(self) -> AbstractContextManager[None]:
        """Around what is no part of a step's time."""
        return self._meter.planning()

    def forget(self, key: Any) -> None:
        if self.runner is not None and self._plans.pop(key, None) is not None:
            self.runner.forget(key)
        self._meter.forget(key)

    def _planned(self, key: Any, plan: Plan, inputs: str, part: str) -> None:
        self._plans[key] = plan
        self._meter.planned(key, plan, inputs, part)

    def give_gradients(self) -> None:
        """To `.grad`: the rest of these micro-batches is not ours."""
        for p in self._held:
            p.grad = self.sums[p].clone()

    def close(self) -> None:
        if self.runner is not None:
            try:
                self.waiting.end()
            finally:
                self.runner.close()

    def abandon(self) -> None:
        """The device is lost."""
        if self.runner is not None:
            self.waiting.abandon()
            self.runner.abandon()

    def _key(self, micro: Micro, parts: Batch) -> tuple[Any, ...]:
        return (parts.key, micro.last, self._held, *self._situation())

    def _situation(self) -> tuple[Any, ...]:
        trainer = self._module.trainer
        groups = self._optimizer.param_groups
        return (
            trainer.accumulate_grad_batches,
            trainer.gradient_clip_val,
            trainer.gradient_clip_algorithm,
            torch.is_autocast_enabled(self._asked.target.device.type),
            tuple([p.requires_grad for p in self._module.parameters()]),
            tuple([tuple(p._backward_hooks or ()) for p in self._module.parameters()]),
            tuple([len(group["params"]) for group in groups]),
        )

    def _capture(self, micro: Micro, parts: Batch) -> Step:
        step = self._traced(micro, parts, micro.last, self._held)
        if self.runner is None:
            whole = self._whole(micro, parts, step)
            self.plan, self.runner = self._settle(whole, step if micro.last else None)
            if micro.last:
                self._planned(step, self.plan, *step.about)
                return step
        self.add(step, step.graph, *step.about)
        return step

    def _whole(self, micro: Micro, parts: Batch, step: Step) -> TaskGraph:
        """With the update, if it has none."""
        return step.graph if micro.last else self._traced(micro, parts, True, step.holds).graph

    def _first_plan(self, whole: TaskGraph) -> Plan:
        """Of a turned step if that is faster."""
        why = self.waiting.why_not() or self._asked.target.why_not_late
        plan = self._asked.plan(whole, late=not why)
        self._note_waiting(plan)
        return plan

    def _note_waiting(self, plan: Plan) -> None:
        """Why updates on the host do not wait for the next step, where they do not."""
        why = self.waiting.why_not() or self._asked.target.why_not_late
        if why and any(task.engine == "host" for task in plan.graph.tasks):
            note = f"no update waits for the next forward pass: {why}"
            for notes in (plan.source.notes, plan.graph.notes):  # what is planned later, and this
                if note not in notes:
                    notes.insert(0, note)

    def _settle(self, whole: TaskGraph, step: Step | None) -> tuple[Plan, Runner]:
        """The first plan, and the runner."""
        plan = self._first_plan(whole)
        if plan.rotation is not None:
            runner = self._asked.target.runner(plan, self.waiting.key(step))
            if self.waiting.begin(runner, plan.rotation, step, whole):
                return plan, runner
            runner.close()
            plan = self._asked.plan(whole)
        return plan, self._asked.target.runner(plan, step)

    def _traced(self, micro: Micro, parts: Batch, last: bool, held: frozenset[Parameter]) -> Step:
        hooks = Hooks(self._module, self._optimizer)
        forward = Forward(self._module, Given("training_step", parts, micro.batch_idx), hooks)
        step = TrainingStep(
            forward,
            self._optimizer,
            hooks.reaches(),
            last,
            self.sums,
            held,
            None if hooks.clip else self._clip(),
            forward.after if hooks.after else None,
            self._ranks,
        )
        with torch.enable_grad():
            graph = capture_step(step, *parts.tensors, device=self._asked.target.device)
        there = {id(source) for source in graph.program.tensors.values()}
        added = {p for p, total in self.sums.items() if id(total) in there}
        return Step(
            forward.recipe(),
            held | added,
            last,
            hooks.zero,
            self._outside(graph),
            graph,
            (shapes_of(parts.key), _part_of(micro)),
        )

    def _outside(self, graph: TaskGraph) -> Mapping[str, torch.Tensor]:
        changed = {b for task in graph.tasks for b in task.writes if graph.buffers[b].persistent}
        own = {id(t) for t in (*self._module.parameters(), *self._module.buffers())}
        found: dict[str, torch.Tensor] = {}
        for name in {graph.buffers[b].tensor for b in changed}:
            source = graph.program.tensors[name]
            for tensor in source if isinstance(source, tuple) else (source,):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in own:
                    found[name] = tensor
        sums = {id(total) for total in self.sums.values()}
        return {name: tensor for name, tensor in found.items() if id(tensor) not in sums}

    def _clip(self) -> Clip | None:
        limit = self._module.trainer.gradient_clip_val
        if not limit or limit <= 0:
            return None
        by = self._module.trainer.gradient_clip_algorithm
        return Clip(float(limit), "norm" if by is None else str(by.value))

    def _forget(self, step: Step) -> None:
        self.waiting.forget(step)
        self.forget(step)


def _part_of(micro: Micro) -> str:
    """Of an optimizer step."""
    if micro.first:
        return "whole step" if micro.last else "first micro-batch"
    return "last micro-batch" if micro.last else "middle micro-batch"
