"""The errors of planning and running a step.

OffloadError
  CaptureError      a step that cannot be captured (names the user's line and what to do)
  GraphError        a TaskGraph, or a size, that is not valid
  BudgetTooSmall    no plan fits: the smallest budget that would, and the task that sets it
  MemoryTooSmall    a plan needs memory that this machine, its cgroup or a device does not have now
  DeviceLost        the device was lost during a run, with everything that was on it
  RaceFound         a MemGraph that does not order two tasks, or has other bytes than expected
  StepError         a call that does not fit the captured step, or a runner that is closed

An exception of a task itself reaches the caller as it is, with a note that names the task.
"""

from typing import Any


class OffloadError(Exception):
    """Base of everything this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all attributes besides the message: the error may come from another process."""
        return _restore, (type(self), self.args, self.__dict__)


class CaptureError(OffloadError):
    """A step that cannot be captured.

    Change the line of your code that the message names, or train without a budget.
    """


class GraphError(OffloadError, ValueError):
    """A TaskGraph, or a size, that is not valid.

    Correct the task, the buffer or the size that the message names.
    """


class BudgetTooSmall(OffloadError):
    """No plan fits into the budget.

    Raise the budget to what the message names, or make the batch smaller.
    """

    def __init__(
        self, fact: str, *, needed: int, task: str, on_host: bool = False, advice: str = ""
    ) -> None:
        """`needed`: the nearest budget that is enough, in bytes; `task`: the task that sets it.
        `on_host`: it is host_budget that is too small. `advice`: what to do."""
        super().__init__(f"{fact}; {advice}" if advice else fact)
        self.fact = fact
        self.needed = needed
        self.task = task
        self.on_host = on_host

    def with_advice(self, advice: str, more: int = 0) -> "BudgetTooSmall":
        """The same refusal with other advice, of a budget that needs `more` bytes."""
        needed, task, on_host = self.needed + more, self.task, self.on_host
        kind = type(self)
        return kind(self.fact, needed=needed, task=task, on_host=on_host, advice=advice)


class MemoryTooSmall(OffloadError):
    """A plan, or measuring for one, needs more memory than the machine, the process's cgroup or a
    device has.

    End what else uses the memory, give a smaller budget, or raise the limit.
    """

    def __init__(self, message: str, *, needed: int, left: int) -> None:
        """`needed`: the bytes that are needed; `left`: the bytes that may still be taken."""
        super().__init__(message)
        self.needed = needed
        self.left = left


class DeviceLost(OffloadError):
    """The device is lost to this process, with all values on it.

    Start a new process from the last checkpoint. If it comes again, `CUDA_LAUNCH_BLOCKING=1`
    names the call.
    """


class RaceFound(OffloadError):
    """Nothing orders two tasks of a MemGraph that touch the same bytes.

    This is a fault of the planner: report it with the graph.
    """

    def __init__(self, message: str, task_a: str, task_b: str, bytes: tuple[int, int, int]) -> None:
        """`bytes`: the arena (a device, or -1 for the host), the first byte, the end."""
        super().__init__(message)
        self.task_a = task_a
        self.task_b = task_b
        self.bytes = bytes


class StepError(OffloadError):
    """A call that does not fit the captured step, or a runner that is closed.

    Capture the step again, or give it the shapes that it was captured with.
    """


def _restore(kind: type[OffloadError], args: tuple[Any, ...], known: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(known)
    return error
