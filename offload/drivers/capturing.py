"""A driver that can capture what is enqueued, and run it again without the host.

    begin_capture(compute)   enqueue record wait enqueue ...   replay = end_capture()
    compute  [fork F1 F2 ............ join]                    enqueue(compute, replay), every step
    h2d        `-> W2 W3 -----------'                          Python is not asked again

Nothing runs while it is captured. Streams take part once they wait for an event of one that does;
they are joined by an event that the first one waits for. What would need the host in the middle
is refused: asking events that are captured, `synchronize`, `begin`, `end`, a value for Python.

A capture that met an error is broken: only `end_capture` or `drop_capture` may follow, and the
streams are as before after them. What was captured before is not to be replayed after it: it may
not know the generator of random numbers any more.
"""

from typing import Any, Protocol

from offload.drivers import Driver, Run


class Capturing(Driver, Protocol):
    """See `Driver`. One capture at a time."""

    def begin_capture(self, origin: Any) -> None:
        """From now on, on this stream and on those that fork from it. All streams are idle."""
        ...

    def end_capture(self) -> Run:
        """What runs it all: to be enqueued on the origin. It keeps what it needs for as long as it
        lives. Raises where the capture is broken or a stream was not joined; it is over then."""
        ...

    def drop_capture(self) -> None:
        """End it and keep nothing; safe where there is none."""
        ...
