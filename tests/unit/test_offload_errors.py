"""Errors of the engine: all exported, and whole in another process."""

import pickle
import re

import pytest

import offload
from offload import (
    BudgetTooSmall,
    CaptureError,
    MemoryTooSmall,
    OffloadError,
    RaceFound,
    errors,
)

MODULE = "offload.errors"


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


def test_every_error_is_exported() -> None:
    ours = {n for n, e in vars(errors).items() if isinstance(e, type) and e.__module__ == MODULE}
    assert "MemoryTooSmall" in ours
    assert ours <= set(offload.__all__)
    assert all(getattr(offload, name) is getattr(errors, name) for name in ours)
    assert ours == set(re.findall(r"^ *([A-Z]\w+)(?:  .*)?$", errors.__doc__ or "", re.MULTILINE))
