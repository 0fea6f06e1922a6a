"""Errors of the engine, as another process gets them."""

import pickle

import pytest

from offload import BudgetTooSmall, CaptureError, OffloadError
from offload.errors import MemoryTooSmall, RaceFound


@pytest.mark.parametrize(
    "error",
    [
        CaptureError("no"),
        BudgetTooSmall("too small", needed=7, task="a"),
        MemoryTooSmall("too small", needed=7, left=3),
        RaceFound("a and b", "a", "b", (0, 1, 2)),
    ],
)
def test_an_error_comes_whole_out_of_another_process(error: OffloadError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
