"""Looking for the closures of a step disturbs no other thread of the process."""

import sys
import threading
from collections.abc import Callable

from offload.watching.value_search import ValueSearch


def scaled(by: float) -> Callable[[float], float]:
    def scale(number: float) -> float:
        return by * number

    return scale


def test_the_closure_that_was_called_is_found_and_no_other_threads_tuple_fails() -> None:
    """Python raises SystemError where a tuple is filled that anybody else holds."""
    scale = scaled(2.0)
    assert scale(1.0) == 2.0
    failed: list[SystemError] = []
    searched = threading.Event()

    def fill() -> None:
        while not searched.is_set():
            try:
                assert len(tuple(number for number in range(100_000))) == 100_000
            except SystemError as error:
                failed.append(error)

    filling = threading.Thread(target=fill)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    filling.start()
    try:
        for _ in range(5):
            search = ValueSearch()
            search.meet_code(scale.__code__, {"__name__": "of_the_user"})
            search.meet_closures()
            (cell,) = scale.__closure__ or ()
            assert id(cell) in search.holders
    finally:
        searched.set()
        filling.join()
        sys.setswitchinterval(interval)
    assert failed == []
