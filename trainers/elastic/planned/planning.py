"""The planned side of a strategy that has a budget: what is refused, the target, and evaluation.

setup             refused by name: what no plan can do
training_step     PlannedWork in place of PlainWork
validation_step   a graph too, in the runner of the lanes (offloading/steps/evaluation.py)
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import lightning as L
import torch

from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.planned.planned_work import PlannedWork
from trainers.elastic.working.gradient_sums import is_dense
from trainers.offloading.hardware.devices import keep_on_host
from trainers.offloading.hardware.target import target_of
from trainers.offloading.plan_request import PlanRequest
from trainers.offloading.steps.evaluation import Evaluation
from trainers.offloading.tracing.hooks import hooks_of
from trainers.offloading.tracing.refusals import reason


class Planning:
    """One strategy's."""

    def __init__(self, budget: str | int) -> None:
        self.request = PlanRequest(budget)
        self.work: PlannedWork | None = None
        self._evaluation: Evaluation | None = None

    def find_target(self, strategy: Any) -> None:
        """Plan for the device of this strategy of Lightning's."""
        target = target_of("auto", strategy.accelerator, strategy.root_device)
        # A GPU's peers have the same bits, and the host's updates would have others.
        where = "auto" if target.device.type == "cpu" else "device"
        measured = target.measured(strategy.precision_plugin)
        self.request = replace(self.request, target=measured, optimizer=where)

    def check_run(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raise `CannotBeElastic` if it is known that this run cannot be planned."""
        if wrong := [*_wrong(trainer, module)]:
            raise CannotBeElastic(
                f"budget={self.request.budget!r}: this run cannot be planned: {'; '.join(wrong)}."
                " Without a plan no budget can be kept: change what is named, or leave out budget="
            )

    def to_device(self, module: L.LightningModule, device: torch.device) -> None:
        """Leave the module on the host. The first plan moves what it keeps on a GPU."""
        keep_on_host(module, device)

    def make_work(self, *args: Any, takes_index: bool, exact: bool) -> PlannedWork:
        if self._evaluation is not None:
            self._evaluation.close()  # the plan of the lanes chooses the homes anew
        self.work = PlannedWork(*args, request=self.request, takes_index=takes_index, exact=exact)
        return self.work

    def evaluate(
        self, module: L.LightningModule, kind: str, eager: Callable[..., Any], *args: Any
    ) -> Any:
        """Return what the module's method `kind` returns."""
        if self._evaluation is None:
            self._evaluation = Evaluation(
                module, self.request, lambda: self.work and self.work.runner
            )
        return self._evaluation.step(kind, eager, *args)

    def close(self) -> None:
        """Give all tensors memory of their own again. It is safe to call again."""
        evaluation, self._evaluation = self._evaluation, None
        work, self.work = self.work, None
        try:
            if evaluation is not None:
                evaluation.close()
        finally:
            if work is not None:
                work.close()


def _wrong(trainer: L.Trainer, module: L.LightningModule) -> Iterator[str]:
    if why := reason(trainer, module):
        yield why
    for hook in hooks_of(trainer, module):
        yield f"{hook}, and a planned update leaves no gradients for it"
    owned = {p for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
    known = {p for p in module.parameters() if p.requires_grad}
    for name, p in module.named_parameters():
        if p.requires_grad and p not in owned:
            yield f"{name} requires a gradient, and the optimizer does not have it: freeze it"
        if p.requires_grad and not is_dense(p):
            yield f"{name} has holes in memory or overlaps itself: give it memory of its own"
    if strange := len([p for p in owned if p.requires_grad and p not in known]):
        yield f"{strange} parameters of the optimizer are none of the module's"
