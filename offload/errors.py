"""What can go wrong between a step and its run.

OffloadError
  CaptureError     a step that cannot be captured (names the user's line and what to do)
  GraphError       a TaskGraph, or a size, that makes no sense
  BudgetTooSmall   no plan fits: the smallest budget that would, and the task that sets it
  MemoryTooSmall   this machine, its cgroup or a device has not the memory that a plan needs now
  DeviceLost       the device is gone in mid-run, and what was on it
  RaceFound        a MemGraph in which two tasks are not ordered, or bytes are not what is expected
  StepError        a call that does not fit the captured step, or a runner that is closed

An exception of a task itself reaches the caller as it is, with a note that names the task.
"""

from typing import Any


class OffloadError(Exception):
    """Base of everything this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """With what it knows besides its message: it may come from another process."""
        return _restored, (type(self), self.args, self.__dict__)


class CaptureError(OffloadError):
    """A step that cannot be captured."""


class GraphError(OffloadError, ValueError):
    """A TaskGraph, or a size, that makes no sense."""


class BudgetTooSmall(OffloadError):
    """No plan fits into the budget."""

    def __init__(self, message: str, *, needed: int, task: str) -> None:
        """`needed`: the smallest budget that would do, in bytes; `task`: the one that sets it."""
        super().__init__(message)
        self.needed = needed
        self.task = task


class MemoryTooSmall(OffloadError):
    """A plan, or what must be measured for one, that this machine, the process's cgroup or a
    device has not the memory for."""

    def __init__(self, message: str, *, needed: int, left: int) -> None:
        """Bytes that it takes more, and that may still be taken."""
        super().__init__(message)
        self.needed = needed
        self.left = left


class DeviceLost(OffloadError):
    """The device, or this process's use of it, is gone, and with it all values that were there."""


class RaceFound(OffloadError):
    """Two tasks of a MemGraph touch the same bytes, and nothing orders them."""

    def __init__(self, message: str, task_a: str, task_b: str, bytes: tuple[int, int, int]) -> None:
        """`bytes`: the arena (a device, or -1 for the host), the first byte, the end."""
        super().__init__(message)
        self.task_a = task_a
        self.task_b = task_b
        self.bytes = bytes


class StepError(OffloadError):
    """A call that does not fit the captured step, or a runner that is closed."""


def _restored(kind: type[OffloadError], args: tuple[Any, ...], known: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(known)
    return error
