"""What calls cost, kept for the next start of the same run, which then measures nothing again.

    all calls of a graph, at zero -> one key -> costs-KEY.json: {call: workspace, seconds, ...}

A cost belongs to a call, the device and what kernels depend on (caching/machine.py). A call that no
text identifies, such as one of a user's own optimizer, is measured at every start. If a
kernel allocates differently than was kept, its results are copied (memory/placement.py).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from offload.caching.machine import machine_of, our_version
from offload.caching.plan_cache import PlanCache
from offload.measuring.allocation_log import allocations_of, peak_of, round_up
from offload.measuring.distinct_calls import signature
from offload.memory.cpu_shim import Log
from offload.memory.cuda_shim import available_on
from offload.memory.placement import Allocation
from offload.program.kernels import CPU, LEAVES, Call, Value, alignment_on
from offload.torch_seams import OpOverload

KIND = "costs"


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs."""

    allocations: tuple[Allocation, ...] | None
    """None: they are unknown, and the outputs are copied."""
    workspace: int
    unplaced: int
    seconds: float | None
    elsewhere: int = 0
    """Bytes that it allocates on threads of its own. They cannot be placed."""
    failure: str = ""
    advance: int | None = None
    """How far it moves the device's default generator on; None: unknown."""


def cost_of(log: Log, outputs: Mapping[int, int], alignment: int, seconds: float) -> Cost:
    """The cost of a call that allocated this. `outputs`: addresses by position."""
    allocations = allocations_of(log, outputs, alignment)
    ends = (a.offset + a.nbytes for a in allocations if a.offset is not None)
    workspace = round_up(max(ends, default=0), alignment)
    return Cost(allocations, workspace, peak_of(log), seconds, log.elsewhere)


class MeasuredCosts:
    """The costs of the calls that were measured before, in this process or at an earlier start."""

    times = True
    """Whether the seconds of a call decide anything, so that they are measured."""

    def __init__(self, kept: "KeptCosts | None" = None) -> None:
        self._kept = kept
        self._names: dict[int, Any] = {}
        self._known: dict[Any, Cost] = {}

    def known_costs(self, device: torch.device, calls: Mapping[int, Call]) -> dict[int, Cost]:
        """As `KeptCosts.known_costs`."""
        self._names = {
            key: (signature(call, alignment_on(device)), device) for key, call in calls.items()
        }
        if self._kept is not None:
            self._note(self._kept.known_costs(device, calls))
        return {key: self._known[name] for key, name in self._names.items() if name in self._known}

    def keep(self, made: Mapping[int, Cost]) -> None:
        """Keep what was measured of the calls that `known_costs` was asked for last."""
        self._note(made)
        if self._kept is not None:
            self._kept.keep(made)

    def _note(self, costs: Mapping[int, Cost]) -> None:
        self._known |= {self._names[key]: cost for key, cost in costs.items()}

    def forget(self) -> None:
        self._known.clear()


class KeptCosts:
    """The costs of calls in a cache. A fit has one."""

    times = True

    def __init__(self, cache: PlanCache) -> None:
        self._cache = cache
        self._key: list[Any] = []
        self._names: dict[Any, str] = {}
        self._known: dict[str, Cost] = {}

    def known_costs(self, device: torch.device, calls: Mapping[Any, Call]) -> dict[Any, Cost]:
        """Return what is kept of these calls, which are all of a graph's on this device."""
        names = {key: name for key, call in calls.items() if (name := digest_call(call))}
        shim = available_on(device) is not None
        self._names, self._known = names, {}
        self._key = [our_version(), machine_of(device), device.type, shim, *sorted(names.values())]
        data = self._cache.read(KIND, self._key) if names else None
        try:
            self._known = {name: _read_cost(cost) for name, cost in (data or {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._cache.refuse(KIND, self._key, f"{type(error).__name__}: {error}")
        return {key: self._known[name] for key, name in names.items() if name in self._known}

    def keep(self, made: Mapping[Any, Cost]) -> None:
        """Keep what was measured of the calls that `known_costs` was asked for last."""
        new = {
            self._names[key]: cost
            for key, cost in made.items()
            if key in self._names and not cost.failure
        }
        if new.keys() - self._known.keys():
            known = {**self._known, **new}
            self._cache.write(KIND, self._key, {name: asdict(cost) for name, cost in known.items()})


def digest_call(call: Call) -> str:
    """A digest that identifies a call, moved to zero, in any process; empty if no text can."""
    op = call.of_torch
    if not isinstance(op, OpOverload):
        return ""
    args, kwargs = _with_plain_numbers(call.args), _with_plain_numbers(dict(call.kwargs))
    parts = str(op), args, kwargs, call.outputs
    if not _is_plain(parts):
        return ""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _with_plain_numbers(tree: Any) -> Any:
    """The same with the number and the type in place of a tensor that torch made of a number."""
    if isinstance(tree, Mapping):
        return {name: _with_plain_numbers(part) for name, part in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(map(_with_plain_numbers, tree))
    is_one = isinstance(tree, torch.Tensor) and tree.ndim == 0 and tree.device == CPU
    return (tree.item(), tree.dtype) if is_one else tree


def _is_plain(tree: Any) -> bool:
    """Whether a `repr` of this says all of it."""
    if isinstance(tree, Mapping):
        return all(isinstance(name, str) and _is_plain(part) for name, part in tree.items())
    if type(tree) in (tuple, list):
        return all(map(_is_plain, tree))
    return type(tree) is Value or type(tree) in LEAVES


def _read_cost(data: Any) -> Cost:
    """Read a cost as `asdict` wrote it."""
    made = dict(data)
    allocations = made["allocations"]
    if allocations is not None:
        made["allocations"] = tuple(Allocation(**entry) for entry in allocations)
    for name in ("workspace", "unplaced", "elsewhere"):
        if type(made[name]) is not int or made[name] < 0:
            raise ValueError(f"{name}={made[name]!r} is not a number of bytes")
    if made["advance"] is not None and type(made["advance"]) is not int:
        raise ValueError(f"advance={made['advance']!r} is no offset of a generator")
    if not isinstance(made["seconds"], float) or set(made) != {
        field.name for field in fields(Cost)
    }:
        raise ValueError("a cost has other fields")
    return Cost(**made)
