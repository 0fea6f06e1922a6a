"""The parts of a plan that are needed to check it against a machine, bind it and run it."""

from typing import Protocol

from offload.graph.costs import Costs
from offload.graph.memgraph import MemGraph
from offload.graph.remarks import Remarks
from offload.graph.taskgraph import TaskGraph


class RunnablePlan(Protocol):
    """A plan that can run. plan.py has the real one; tests make their own."""

    @property
    def graph(self) -> TaskGraph: ...

    @property
    def memgraph(self) -> MemGraph: ...

    @property
    def placement(self) -> str:
        """`shim` or `copy`."""
        ...

    @property
    def costs(self) -> Costs:
        """The costs that the plan was made with."""
        ...

    @property
    def reserve(self) -> int:
        """Bytes that kernels allocate outside of the arenas."""
        ...

    @property
    def remarks(self) -> Remarks:
        """Where a run says what it found out."""
        ...

    def explain(self) -> str: ...

    def replan(self, graph: TaskGraph) -> "RunnablePlan":
        """A plan for a batch of another shape, with the same budget and homes."""
        ...
