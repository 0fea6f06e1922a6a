"""Estimates the seconds of tasks and copies: a roofline until they are measured. Pure."""

from dataclasses import dataclass

from offload.graph.taskgraph import Task
from offload.graph.topology import Topology


@dataclass(frozen=True, slots=True)
class Costs:
    """The rates of a machine. The defaults are those of one CPU core and its memory."""

    flops: float = 5e10
    """Operations per second of a compute lane."""
    memory: float = 1e10
    """Bytes per second that a compute lane reads and writes."""
    launch: float = 5e-6
    """The least seconds that a task takes."""
    h2d: float = 8e9
    """Bytes per second of copies to the device; `d2h`: of copies to the host."""
    d2h: float = 8e9
    shared: float = 1.0
    """The share of its rate that a direction keeps while the other one copies, too."""
    d2d: float = 8e9
    """From one device to another."""
    copy: float = 1e-5
    """The least seconds that a copy takes."""
    host_memory: float = 8e9
    """Bytes per second that a host worker reads and writes."""
    host_workers: int = 1
    topology: Topology | None = None
    """What several devices share; None: nothing."""

    def of_task(self, task: Task) -> float:
        if task.seconds is not None:
            return task.seconds
        if task.lane == "host":
            return self.launch + task.traffic / self.host_memory
        return self.launch + max(task.flops / self.flops, task.traffic / self.memory)

    def of_copy(self, kind: str, nbytes: int) -> float:
        """Seconds of a copy. `kind`: offload, reload or send."""
        rates = {"offload": self.d2h, "reload": self.h2d, "send": self.send}
        return self.copy + nbytes / rates[kind]

    @property
    def send(self) -> float:
        """Bytes per second of a copy from one device to another."""
        if self.topology is None:
            return self.d2d
        between = self.topology.between
        return min(self.h2d, self.d2h, self.d2d) if between is None else between
