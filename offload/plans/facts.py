"""What explain.py and picture.py ask of a plan.

`Plan` calls both, so they cannot import it. They know this protocol instead.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

from offload.graph.costs import Costs
from offload.graph.memgraph import MemGraph
from offload.graph.remarks import Remarks
from offload.graph.taskgraph import TaskGraph
from offload.planning.simulator import Bound, Simulation
from offload.planning.wanted import FoundPlan


class PlanFacts(Protocol):
    """See `Plan` for what each of them means."""

    @property
    def source(self) -> TaskGraph: ...

    @property
    def found(self) -> FoundPlan: ...

    @property
    def graph(self) -> TaskGraph: ...

    @property
    def memgraph(self) -> MemGraph: ...

    @property
    def simulation(self) -> Simulation: ...

    @property
    def budget(self) -> Mapping[int, int | None]: ...

    @property
    def host_budget(self) -> int | None: ...

    @property
    def costs(self) -> Costs: ...

    @property
    def placement(self) -> str: ...

    @property
    def recompute(self) -> bool: ...

    @property
    def optimizer(self) -> str: ...

    @property
    def remarks(self) -> Remarks: ...

    @property
    def predicted_seconds(self) -> float: ...

    @cached_property
    def resident_seconds(self) -> float: ...

    @property
    def bound(self) -> Bound: ...

    @property
    def reserve(self) -> int: ...

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    @cached_property
    def peak_bytes(self) -> int: ...
