"""What is needed of a plan to check it against a machine, bind it and run it."""

from typing import Protocol

from offload.costs import Costs
from offload.memgraph import MemGraph
from offload.taskgraph import TaskGraph


class Plan(Protocol):
    """plan.py has the one that there is; tests have their own."""

    @property
    def graph(self) -> TaskGraph: ...

    @property
    def memgraph(self) -> MemGraph: ...

    @property
    def placement(self) -> str:
        """shim or copy"""
        ...

    @property
    def costs(self) -> Costs:
        """What it was made for."""
        ...

    @property
    def reserve(self) -> int:
        """Bytes that kernels allocate outside of the arenas."""
        ...

    def explain(self) -> str: ...

    def replan(self, graph: TaskGraph) -> "Plan":
        """For a batch of another shape: the same budget, the same homes."""
        ...
