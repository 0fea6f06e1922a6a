"""Seconds that a task and a copy take: a roofline until they were measured. Pure."""

from dataclasses import dataclass

from offload.taskgraph import RANKS, Task


@dataclass(frozen=True, slots=True)
class Costs:
    """A machine, by its rates. The defaults are one CPU core's and its memory's."""

    flops: float = 5e10
    """Per second, of a compute engine."""
    memory: float = 1e10
    """Bytes per second that a compute engine reads and writes."""
    launch: float = 5e-6
    """Seconds that a task takes at least."""
    h2d: float = 8e9
    """Bytes per second."""
    d2h: float = 8e9
    shared: float = 1.0
    """Of its rate that a direction keeps while the other one copies too."""
    d2d: float = 8e9
    copy: float = 1e-5
    """Seconds that a copy takes at least."""
    ranks: float = 1e9
    """Bytes per second that all processes sum up."""
    host_memory: float = 8e9
    """Bytes per second that a host worker reads and writes."""
    host_workers: int = 1

    def of_task(self, task: Task) -> float:
        if task.seconds is not None:
            return task.seconds
        if task.engine == "d2d":
            return self.copy + task.traffic / self.d2d
        if task.engine == RANKS:
            return self.copy + task.traffic / self.ranks
        if task.engine == "host":
            return self.launch + task.traffic / self.host_memory
        return self.launch + max(task.flops / self.flops, task.traffic / self.memory)

    def of_copy(self, kind: str, nbytes: int) -> float:
        """`kind`: offload or reload."""
        return self.copy + nbytes / (self.h2d if kind == "reload" else self.d2h)
