"""Runs a module with weights that do not fit, without gradients.

    prefill(module, x, budget="8GiB")     host   w0 w1 w2 w3 ...      a weight comes when its layer
                                          device    [w1|w2|y1]        needs it; nothing goes back

The module runs as it is; calling `eval()` is the caller's business. Its weights are never copied
back, because the host has the same bytes.

    with Prefill(module, budget="8GiB") as fill:     many calls: every shape is planned once
        y = fill(x)
"""

from typing import Any

import torch

from offload.live.placing import Device, device_of
from offload.live.runner_plans import PlainPlanner
from offload.live.session import LiveSession
from offload.plans.plan import Budget, Plan


class Prefill:
    """A context manager. Within it the module's weights are where the calls want them."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        budget: Budget = None,
        device: Device = None,
        **options: Any,
    ) -> None:
        """As `prefill` takes them. Without a budget a call runs as without us, until another one of
        its shape has come."""
        self._module = module
        self._device = device_of(device, (), (*module.parameters(), *module.buffers()))
        planner = PlainPlanner(**options)
        self._session = LiveSession(module, budget=budget, device=self._device, planner=planner)

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest call; None until one is planned."""
        return self._session.plan

    def __enter__(self) -> "Prefill":
        self._session.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._session.__exit__(*error)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Compute `module(*inputs)`."""
        there = [each.to(self._device) for each in inputs]
        with torch.no_grad(), self._session.step("prefill"):
            return self._module(*there)


def prefill(
    module: torch.nn.Module,
    *inputs: torch.Tensor,
    budget: Budget = None,
    device: Device = None,
    **options: Any,
) -> Any:
    """Compute `module(*inputs)` within `budget` bytes of the device, and return its result.

    `device`: where it runs, by default where the module and the inputs are; the module may stay on
    the host. `options`: those of `offload.plan`. For many calls: `offload.live.prefill.Prefill`."""
    place = device_of(device, inputs, (*module.parameters(), *module.buffers()))
    with Prefill(module, budget=budget, device=place, **options) as fill:
        return fill(*inputs)
