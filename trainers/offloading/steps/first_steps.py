"""The first steps of a fit are made twice, by the graph and by plain Lightning, and compared.

    graph's turn (two on a GPU) -> back to the start -> all tensors to one device -> plain Lightning
                                                                compare -> each tensor at home again

`comparison.py` says what is compared. On a GPU, plain Lightning's step needs the whole model there,
beside the plan's arena. If there is no room for it, the steps are not compared and a warning says
so.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from offload import Plan, TaskGraph
from offload.watching.watched_state import WatchedState, brief
from trainers.offloading.hardware.devices import MovedTensors, bring_gradients, tensors_of
from trainers.offloading.hardware.generators import generators_of
from trainers.offloading.hardware.target import Target
from trainers.offloading.steps.comparison import (
    APART,
    OPTIMIZER,
    DifferenceFound,
    ExpectedStep,
    StepStart,
    compare_gradients,
    gradient_of,
    no_room,
    state_of,
)
from trainers.offloading.steps.micro_batch import StepGraph
from trainers.offloading.steps.step_graphs import StepGraphs
from trainers.offloading.tracing.batch_parts import BatchParts

MOST_NUMBERS = 8
"""So many Python values are named."""

NAMED = 3
"""A warning names so many tensors."""


def check_count(check_first_steps: int) -> None:
    """Raise `ValueError` if this is no number of steps."""
    if type(check_first_steps) is not int or check_first_steps < 0:
        raise ValueError(
            f"check_first_steps={check_first_steps!r}: give a number of steps, 0 or more"
        )


class FirstSteps:
    """Compares the first `count` optimizer steps of one fit."""

    def __init__(self, count: int, falls_back: bool = False) -> None:
        """`falls_back`: a difference is kept for the caller, who goes on with plain Lightning's
        steps; otherwise it is raised."""
        self.difference: DifferenceFound | None = None
        """The first difference that was found."""
        self._falls_back = falls_back
        self.expected: ExpectedStep | None = None
        """The graph's results for the micro-batch that plain Lightning makes now, if it does."""
        self._count = self._left = count
        self._step: StepGraph | None = None
        self._moved: MovedTensors | None = None
        self._warned = False

    @property
    def due(self) -> bool:
        """Whether the present step is compared."""
        return self._left > 0

    def begin(self, steps: StepGraphs) -> None:
        """Begin an optimizer step. The gradients of the last compared step are removed, but a step
        that optimizes by hand removes them itself."""
        self.expected = None
        if self._left == 0 and self._count:
            if not steps.by_hand:
                steps.optimizer.zero_grad()
            self._left = -1

    def possible(self, plan: Plan, target: Target) -> bool:
        """Whether the device has room for plain Lightning's step. Only the first call decides."""
        if self._left != self._count or not (why := no_room(plan, target.free_bytes())):
            return True
        rank_zero_warn(
            f"OffloadStrategy(check_first_steps={self._count}): the first steps are not compared"
            f" with plain Lightning, because {why}. check_first_steps=0 silences this warning"
        )
        self._left = -1
        return False

    def run(
        self,
        steps: StepGraphs,
        step: StepGraph,
        parts: BatchParts,
        module: L.LightningModule,
        target: Target,
    ) -> None:
        """Run the graph and keep its results, then restore the start for the eager step."""
        self._step = step
        optimizers, device = module.trainer.optimizers, target.device
        names = {p: name for name, p in module.named_parameters()}
        sums = {gradient_of(names, p): total for p, total in steps.sums.items()}
        own = generators_of(step.graph)
        entries = [StateEntries.of(optimizer) for optimizer in optimizers]
        held = steps.held
        start = StepStart.of({**self._state(module), **sums}, device, own)

        def turn() -> ExpectedStep:
            outputs = steps.run(step, parts)
            loss = step.recipe.loss(outputs, parts.given)
            return ExpectedStep.of({**self._state(module), **sums}, loss, device, own)

        first = turn()
        if device.type != "cpu" and _on_host(steps.plan):
            trained = {*names.values()}
            first = first.rounded(
                [n for n in first.values if n in trained or n.startswith(OPTIMIZER)]
            )
        if target.may_vary:
            for each in entries:
                each.restore()
            start.restore({**self._state(module), **sums})
            steps.hold(held)
            again = turn()  # from the same start
            varying = first.unlike(again)
            self._warn_of_varying(varying)
            apart = {name: max(far, first.apart.get(name, 0.0)) for name, far in varying.items()}
            first = replace(first, apart={**first.apart, **apart})
        self.expected = first
        for each in entries:
            each.restore()
        everything = [*tensors_of(module, optimizers), *step.outside.values()]
        if steps.by_hand:  # plain Lightning adds to the sums, which are in .grad
            start.restore({**self._state(module), **sums})
            steps.hold(frozenset())
            everything += steps.sums.values()
        else:
            start.restore(self._state(module))
        self._moved = MovedTensors(everything, device)
        if steps.by_hand:  # where parameter and sum are on one device now
            steps.hold(held)
        else:
            bring_gradients(everything)

    def compare_loss(self, eager: Any) -> None:
        if self.expected is not None:
            with self._judged():
                self.expected.compare_loss(eager)

    def compare_gradients(self, module: L.LightningModule, steps: StepGraphs | None) -> None:
        """Compare the sums of gradients after a backward pass."""
        if self.expected is None or steps is None or self._step is None:
            return
        names = {p: name for name, p in module.named_parameters()}
        with self._judged():
            compare_gradients(names, steps.sums, steps.just_held, self.expected.apart)
        if not self._step.last:
            with self._judged():
                self.expected.compare_random()
            self.bring_home()

    def compare_by_hand(self, eager: Any, module: L.LightningModule) -> None:
        """Compare a step that optimizes by hand, which plain Lightning has made as a whole."""
        self.compare_loss(eager)
        if self.expected is not None and self._step is not None:
            names = {p: name for name, p in module.named_parameters()}
            with self._judged():
                self.expected.compare_left(names, self._step.holds)
        self.compare_state(module)

    def compare_state(self, module: L.LightningModule) -> None:
        """Compare all that the step changed, after the update."""
        if self.expected is None:
            return
        with self._judged():
            self.expected.compare_state(self._state(module))
            self.expected.compare_random()
        self.expected = None  # a copy of all state: the next step may be long in coming
        self.bring_home()
        self._left -= 1

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Say of a difference that is found in this block where to look; raise or keep it."""
        try:
            yield
        except DifferenceFound as error:
            if self.difference is not None:
                return  # it follows from the first one
            why = ""
            if self._step is not None:
                why = suspects(error.name, self._step.graph, self._step.recipe.watched)
            found = DifferenceFound(f"{error}. {why}" if why else str(error), error.name)
            if not self._falls_back:
                raise found from None
            self.difference = found

    def bring_home(self) -> None:
        """Return every tensor to where it was before plain Lightning's step."""
        away, self._moved = self._moved, None
        if away is not None:
            away.back()

    def _state(self, module: L.LightningModule) -> dict[str, torch.Tensor]:
        """Return, by name, all tensors that a step changes."""
        outside = self._step.outside if self._step is not None else {}
        return {**state_of(module, module.trainer.optimizers), **outside}

    def _warn_of_varying(self, apart: Mapping[str, float]) -> None:
        if not apart or self._warned:
            return
        self._warned = True
        more = f" and {len(apart) - NAMED} more" if len(apart) > NAMED else ""
        rank_zero_warn(
            "OffloadStrategy: two runs of the same planned step differ in the last bits of"
            f" {', '.join(list(apart)[:NAMED])}{more}: a kernel of this device adds numbers in"
            " another order every time. These tensors may differ from plain Lightning's by"
            f" {APART:g} times as much as the two runs do; all others must be equal to the last bit"
        )


def _on_host(plan: Plan | None) -> bool:
    """Whether this plan updates parameters on the host."""
    return plan is not None and any(task.lane == "host" for task in plan.graph.tasks)


def suspects(differs: str, graph: TaskGraph, watched: WatchedState) -> str:
    """Say where to look: the first task that uses the tensor `differs`, and the numbers that Python
    code gave to the step."""
    return " ".join(filter(None, (_first_use(differs, graph), _numbers(watched))))


def _first_use(differs: str, graph: TaskGraph) -> str:
    for task in graph.tasks:
        for buffer in (*task.reads, *task.writes):
            tensor = graph.buffers[buffer].tensor
            if graph.buffers[buffer].persistent and tensor and _names(differs, tensor):
                where = f" ({task.where})" if task.where else ""
                return f"{tensor} is first used by {task.name}{where}."
    return ""


def _names(differs: str, tensor: str) -> bool:
    return differs == tensor or differs.endswith((f" {tensor}", f".{tensor}"))


def _numbers(watched: WatchedState) -> str:
    said = list(dict.fromkeys(_values(watched)))
    more = f" and {len(said) - MOST_NUMBERS} more" if len(said) > MOST_NUMBERS else ""
    return (
        f"Numbers that the step read in Python: {', '.join(said[:MOST_NUMBERS])}{more}."
        if said
        else ""
    )


def _values(watched: WatchedState) -> Iterator[str]:
    for each in (*watched.dicts, *watched.lists, *(one for _, one in watched.others)):
        for key, value in zip(each.keys, each.values, strict=True):
            if isinstance(value, float):
                yield f"{each.label(key)} = {brief(value)}"


@dataclass(frozen=True, slots=True, eq=False)
class StateEntries:
    """The entries of an optimizer's state by parameter, at a step's start. A step may add entries,
    and count in numbers; tensors have their values restored elsewhere (comparison.py)."""

    optimizer: Optimizer
    entries: Mapping[torch.Tensor, Mapping[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> "StateEntries":
        return cls(optimizer, {p: dict(state) for p, state in optimizer.state.items()})

    def restore(self) -> None:
        """Give the state the entries that it had, in the same dicts."""
        state = self.optimizer.state
        for p in [p for p in state if p not in self.entries]:
            del state[p]
        for p, entries in self.entries.items():
            state[p].clear()
            state[p].update(entries)
