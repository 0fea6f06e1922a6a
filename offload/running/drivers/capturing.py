"""A driver that captures what is enqueued, so that it can run again without the host.

    begin_capture(compute)   enqueue record wait enqueue ...   replay = end_capture()
    compute  [fork F1 F2 ............ join]                    enqueue(compute, replay), every step
    h2d        `-> W2 W3 -----------'                          runs no Python

Nothing runs while it is captured. A stream takes part once it waits for an event of one that does.
It joins through an event for which the first stream waits. What would need the host in between is
refused: asking captured events, `synchronize`, `begin`, `end`, a value for Python.

A capture that met an error is broken. Only `end_capture` or `drop_capture` may follow, and after
them the streams are as before. Do not replay earlier captures after that: they may no longer know
the random generator.
"""

from typing import Any, Protocol

from offload.running.drivers.driver import Driver, Run


class Capturing(Driver, Protocol):
    """A driver with captures; see `Driver`. It makes one capture at a time."""

    def begin_capture(self, origin: Any) -> None:
        """Start to capture on this stream and on those that fork from it. All streams are idle."""
        ...

    def end_capture(self) -> Run:
        """End the capture. Returns a function that runs it, to be enqueued on the origin; it keeps
        what it needs alive. Raises if the capture is broken or a stream has not joined; it has
        ended then, too."""
        ...

    def drop_capture(self) -> None:
        """End the capture and keep nothing. Does nothing if there is none."""
        ...
