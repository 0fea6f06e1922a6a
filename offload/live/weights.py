"""What lives from step to step: its storages give their bytes to homes of ours, which a plan moves.

the user's storage   --adopt-->   no bytes; shows those at home when somebody looks
every alias of it                 follows by itself, for it is the same storage
"""

from collections.abc import Mapping
from typing import Any

import torch

from offload.errors import CaptureError
from offload.graph.taskgraph import Role
from offload.live.graphs import Weight


class LiveWeights:
    """The adopted storages of a session."""

    def __init__(
        self, core: Any, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._core = core
        self._module = module
        self._optimizer = optimizer
        self._known: dict[int, Weight] = {}

    def of(self, tape: Any) -> dict[int, Weight]:
        """Those of a tape, by slot. What is new is adopted: the module's storages, the optimizer's,
        and whatever else the step writes."""
        named, written, at_once = self._named(), {*tape.written}, {*tape.used_at_once}
        origins = tape.origins
        for slot in tape.used:
            known = named.get(tape.identity(slot))
            if origins[slot] != self._core.GIVEN or not (known or slot in written):
                continue
            name, role = known or (f"tensor.{slot}", Role.BUFFER)
            if slot in at_once:
                if slot in written:
                    raise CaptureError(f"{name} is written by kernels and, on the host, at once")
                continue  # such as a counter of steps
            own, home = tape.adopt(slot)
            self._known[own] = Weight(name, role, home)
        return {slot: self._known[own] for slot, own in enumerate(tape.origins) if own >= 0}

    def _named(self) -> dict[int, tuple[str, Role]]:
        """Names and roles by the identity of the storage."""
        found: dict[int, tuple[str, Role]] = {}
        for name, tensor in self._module.named_parameters():
            found[self._core.identity(tensor)] = name, Role.PARAMETER
        for name, tensor in self._module.named_buffers():
            found.setdefault(self._core.identity(tensor), (name, Role.BUFFER))
        states: Mapping[Any, Any] = self._optimizer.state if self._optimizer else {}
        for parameter, state in states.items():
            owner, _ = found.get(self._core.identity(parameter), ("optimizer", Role.STATE))
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found.setdefault(self._core.identity(value), (f"{owner}.{key}", Role.STATE))
        return found
