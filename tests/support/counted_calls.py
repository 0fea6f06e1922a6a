"""A clock that no other program disturbs: how many calls of functions something takes."""

import sys
from collections.abc import Callable
from types import FrameType


def calls_of(run: Callable[[], object]) -> int:
    """How many calls, of Python and of C, `run` takes."""
    count = 0

    def tick(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tick)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
