"""A budget around a training loop that somebody else wrote.

    with offload.within("8GiB", model, optimizer):
        for batch in loader:
            loss = model(batch)       a step begins where the model is called
            loss.backward()
            optimizer.step()          and ends where its update does

    model(a) backward model(b) backward step    a step for every batch: the gradients stay
    model(a) model(b) backward step             one step
    model(a) without gradients                  a step of its own: evaluation

What runs between two steps runs at once, as without us.
"""

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch

from offload.live.session import LiveSession
from offload.plans.plan import Budget, Plan


class BudgetedLoop:
    """A context manager that can be used once."""

    def __init__(
        self,
        budget: Budget,
        model: torch.nn.Module,
        *optimizers: Any,
        device: torch.device | str | None,
        keep_gradients: bool,
        devices: int,
    ) -> None:
        self._model = model
        self._parameters = tuple(model.parameters())
        # accelerate wraps an optimizer in another one, whose `step` calls the wrapped one's
        self._optimizers = [getattr(each, "optimizer", each) for each in optimizers]
        self._keeps_gradients = keep_gradients
        there = device or next((p.device for p in model.parameters()), "cpu")
        self._session = LiveSession(
            model, *self._optimizers, budget=budget, device=there, overlaps=True, devices=devices
        )
        self._open = ExitStack()
        self._calls = 0
        """How many calls of the model are nested now."""
        self._is_in_update = False
        self._is_in_step = False

    @property
    def plan(self) -> Plan | None:
        """The plan that says where the weights are; None until a step is planned."""
        return self._session.plan

    @property
    def planned_steps(self) -> int:
        """How many steps ran by a plan."""
        return self._session.planned_steps

    def __enter__(self) -> "BudgetedLoop":
        self._open.enter_context(self._session)
        self._open.push(self._leave)
        hooks: list[Any] = [
            self._model.register_forward_pre_hook(self._before_model),
            self._model.register_forward_hook(self._after_model, always_call=True),
        ]
        for optimizer in self._optimizers:
            hooks.append(optimizer.register_step_pre_hook(self._before_update))
            hooks.append(optimizer.register_step_post_hook(self._after_update))
        for hook in hooks:
            self._open.callback(hook.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def _leave(self, *error: object) -> None:
        """The loop has ended within a step, or an error ends it."""
        if self._is_in_step:
            self._is_in_step = False
            refusal = self._session.explain_failure(error[1])
            self._session.end_as_issued()
            if refusal is not None:
                raise refusal

    def _before_model(self, model: torch.nn.Module, given: object) -> None:
        self._calls += 1
        if self._calls > 1 or self._is_in_update or self._session.is_backward:
            return
        trains = torch.is_grad_enabled()
        if self._is_in_step and trains and (self._session.has_backward or not model.training):
            self._end(keeps=self._parameters)
        self._begin("step" if trains else "evaluation")

    def _after_model(self, model: torch.nn.Module, given: object, made: object) -> None:
        self._calls -= 1
        if self._calls == 0 and self._session.name == "evaluation":
            self._end(keeps=self._parameters)

    def _before_update(self, *call: object) -> None:
        self._begin("step")
        self._is_in_update = True  # it may call the model, as L-BFGS does

    def _after_update(self, *call: object) -> None:
        self._is_in_update = False
        self._end(keeps=self._parameters if self._keeps_gradients else ())

    def _begin(self, name: str) -> None:
        if not self._is_in_step:
            self._session.begin(name)
            self._is_in_step = True

    def _end(self, *, keeps: Collection[torch.Tensor]) -> None:
        if self._is_in_step:
            self._is_in_step = False
            self._session.end(keeps=keeps)


def within(
    budget: Budget,
    model: torch.nn.Module,
    *optimizers: Any,
    device: torch.device | str | None = None,
    keep_gradients: bool = False,
    devices: int = 1,
) -> BudgetedLoop:
    """Keep the steps of a loop within `budget` bytes of the model's device.

    `budget`: bytes, a size such as 8GiB, or a share of what the step needs such as 60%. `device`:
    where the steps run, if the model is elsewhere because there is no room for it: until the end it
    looks as if it were there. `keep_gradients`: `.grad` can be read after an update; it costs the
    gradients' bytes. `devices`: spread the steps over so many, from that one on, each of which has
    the budget; all bits stay."""
    return BudgetedLoop(
        budget,
        model,
        *optimizers,
        device=device,
        keep_gradients=keep_gradients,
        devices=devices,
    )
