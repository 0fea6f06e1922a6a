"""What calls cost, as it was seen while they were recorded on stand-ins (csrc/stand_ins.h).

It tells what a call allocates, and its seconds only roughly: it ran once. That is enough for a plan
in which nothing moves, which no seconds decide. Other calls and other plans are measured.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from offload.live.tape_kernel import TapeKernel
from offload.measuring.kept_costs import Cost, MeasuredCosts, cost_of
from offload.memory.cpu_shim import AllocatorEvent, Log, available
from offload.memory.placement import Allocation
from offload.program.kernels import CPU, Call, alignment_on

OF_TORCH = ("aten::native_batch_norm", "aten::native_layer_norm", "aten::native_group_norm",
            "aten::mean", "aten::sum", "aten::var")  # fmt: skip
"""Beginnings of the names of kernels that call no library."""


class TriedCosts(MeasuredCosts):
    """The costs of calls that were watched or measured."""

    times = False

    def known_costs(self, device: torch.device, calls: Mapping[int, Call]) -> dict[int, Cost]:
        tried = {key: cost for key, call in calls.items() if (cost := _read_tried(call))}
        others = {key: call for key, call in calls.items() if key not in tried}
        return tried | super().known_costs(device, others)

    def keep(self, made: Mapping[int, Cost]) -> None:
        self._note(made)  # and no cache keeps what has no seconds


def costs_without_moves(core: Any, device: torch.device) -> MeasuredCosts:
    """The costs for plans in which nothing moves."""
    shim = available() if device == CPU else None
    if shim is None:
        return MeasuredCosts()
    core.watch_allocations(*shim.recorders)
    return TriedCosts()


def _read_tried(call: Call) -> Cost | None:
    """None for a part of what was watched, and where other memory than that of the results was
    there: it may be a library's cache. Kernels of torch's own have none."""
    if not isinstance(call.op, TapeKernel) or (tried := call.op.node.tried) is None:
        return None
    events, homes, elsewhere, seconds = tried
    if not events:  # in place, as most updates are
        return Cost((), 0, 0, seconds, elsewhere)
    log = Log(tuple(AllocatorEvent(*event) for event in events), len(events), elsewhere)
    outputs = {n: homes[n] for n, value in enumerate(call.outputs) if value is not None}
    cost = cost_of(log, outputs, alignment_on(CPU), seconds)
    assert cost.allocations is not None
    is_pointwise = torch.Tag.pointwise in getattr(call.of_torch, "tags", ())
    has_no_cache = is_pointwise or call.op.node.op.startswith(OF_TORCH)
    known = [_is_whole(a, call) if a.output is not None else has_no_cache
             for a in cost.allocations]  # fmt: skip
    return cost if all(known) else None


def _is_whole(allocation: Allocation, call: Call) -> bool:
    value = call.outputs[allocation.output or 0]
    return value is not None and prod(value.size) * value.dtype.itemsize == allocation.nbytes
