"""The first steps of a fit that plain Lightning makes too (check.py): when, and where.

    graph's turn (two on a GPU) -> back to the start -> all tensors to one device -> plain Lightning
                                                                compare -> each tensor at home again

Plain Lightning's step on a GPU needs the whole of the model there, beside the plan's arena. Where
there is no room for it the steps are not compared, and one warning says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from offload import Plan
from trainers.check import (
    APART,
    OPTIMIZER,
    Expected,
    Start,
    compare_gradients,
    gradient_of,
    no_room,
    state_of,
)
from trainers.closure import Batch
from trainers.devices import Away, tensors_of
from trainers.steps import Step, Steps
from trainers.target import Target

NAMED = 3
"""Tensors that a warning names."""


class FirstSteps:
    """Of one fit."""

    def __init__(self, count: int) -> None:
        self.expected: Expected | None = None
        """Of the micro-batch that plain Lightning makes now."""
        self._asked = self._left = count
        self._step: Step | None = None
        self._away: Away | None = None
        self._said = False

    @property
    def due(self) -> bool:
        """Whether the step that begins now, or is under way, is one of them."""
        return self._left > 0

    def begin(self, zero_gradients: Callable[[], Any]) -> None:
        """Of an optimizer step. `zero_gradients`: what the checked steps have left."""
        self.expected = None
        if self._left == 0 and self._asked:
            zero_gradients()
            self._left = -1

    def possible(self, plan: Plan, target: Target) -> bool:
        """Asked before the first of them: whether there is room."""
        if self._left != self._asked or not (why := no_room(plan, target.free_bytes())):
            return True
        rank_zero_warn(
            f"OffloadStrategy(check_first_steps={self._asked}): the first steps are not compared"
            f" with plain Lightning: {why}. check_first_steps=0 says that you know"
        )
        self._left = -1
        return False

    def run(
        self, steps: Steps, step: Step, parts: Batch, module: L.LightningModule, target: Target
    ) -> None:
        """The graph's turn. The start is there again afterwards, for the eager step."""
        self._step = step
        optimizer, device = module.trainer.optimizers[0], target.device
        names = {p: name for name, p in module.named_parameters()}
        sums = {gradient_of(names, p): total for p, total in steps.sums.items()}
        start = Start.of({**self._state(module), **sums}, device)

        def turn() -> Expected:
            outputs = steps.run(step, parts)
            loss = step.recipe.loss(outputs, parts.tensors)
            return Expected.of({**self._state(module), **sums}, loss, device)

        first = turn()
        if device.type != "cpu" and _on_host(steps.plan):
            trained = {*names.values()}
            first = first.rounded(
                [n for n in first.values if n in trained or n.startswith(OPTIMIZER)]
            )
        if target.may_vary:
            start.restore({**self._state(module), **sums})
            again = turn()  # from where the first one began
            varying = first.unlike(again)
            self._say(varying)
            apart = {name: max(far, first.apart.get(name, 0.0)) for name, far in varying.items()}
            first = replace(first, apart={**first.apart, **apart})
        self.expected = first
        start.restore(self._state(module))
        everything = [*tensors_of(module, [optimizer]), *step.outside.values()]
        self._away = Away(everything, device)

    def compare_loss(self, eager: Any) -> None:
        if self.expected is not None:
            self.expected.compare_loss(eager)

    def compare_gradients(self, module: L.LightningModule, steps: Steps | None) -> None:
        """After every backward pass."""
        if self.expected is None or steps is None or self._step is None:
            return
        names = {p: name for name, p in module.named_parameters()}
        compare_gradients(names, steps.sums, steps.just_held, self.expected.apart)
        if not self._step.last:
            self.expected.compare_random()
            self.go_home()

    def compare_state(self, module: L.LightningModule) -> None:
        """After the update."""
        if self.expected is None:
            return
        self.expected.compare_state(self._state(module))
        self.expected.compare_random()
        self.go_home()
        self._left -= 1

    def go_home(self) -> None:
        """Every tensor is where it was before plain Lightning's turn."""
        away, self._away = self._away, None
        if away is not None:
            away.back()

    def _state(self, module: L.LightningModule) -> dict[str, torch.Tensor]:
        """All that a step changes, by name."""
        outside = self._step.outside if self._step is not None else {}
        return {**state_of(module, module.trainer.optimizers[0]), **outside}

    def _say(self, apart: Mapping[str, float]) -> None:
        if not apart or self._said:
            return
        self._said = True
        more = f" and {len(apart) - NAMED} more" if len(apart) > NAMED else ""
        rank_zero_warn(
            "OffloadStrategy: two runs of one planned step have other last bits in"
            f" {', '.join(list(apart)[:NAMED])}{more}: a kernel of this device sums in another"
            f" order every time. These may differ from plain Lightning's by {APART:g} times what"
            " the two runs do; everything else must be equal to the last bit"
        )


def _on_host(plan: Plan | None) -> bool:
    """Whether it updates there."""
    return plan is not None and any(task.engine == "host" for task in plan.graph.tasks)
