"""Watched values are compared by identity, and plain ones by value."""

import math
from collections import deque
from typing import Any

import numpy as np
import pytest

from offload.watching.frozen_state import frozen
from offload.watching.holders import Items, Names, One
from offload.watching.watched_state import MISSING, WatchedState, alike, brief

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        (0.0, -0.0, False),
        (math.nan, -NAN, True),
        (np.float32(0.5), np.float32(0.5), True),
        (np.float32(0.5), 0.5, False),
        ("a", "a" * 1, True),
        ((1, (2, 3)), (1, (2, 3)), True),
        ((1, (2, 3)), (1, (2, 4)), False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": [1]}, {"a": [1], "b": 2}, False),
        ({1, 2}, {2, 1}, True),
        (deque([1]), deque([1, 2]), False),
        (np.zeros(2), np.zeros(2), True),
        (np.zeros(2), np.zeros(2, np.float32), False),
        (object(), object(), False),
    ],
)
def test_values_that_are_alike(one: Any, other: Any, equal: bool) -> None:
    assert alike(one, other) is equal


def watched(*holders: Any) -> WatchedState:
    for holder in holders:
        if isinstance(holder, Names):
            for name in ("beta", "gamma"):
                holder.note(name)
    return frozen({id(holder.own): holder for holder in holders}, ())


def test_names_of_a_dict_are_watched_present_or_absent() -> None:
    own: dict[str, Any] = {"beta": 0.5, "other": 1}
    state = watched(Names(own, "self"))
    assert state.same()
    own["other"] = 2  # nobody read it
    assert state.same()
    own["beta"] = 0.25
    assert not state.same()
    assert [str(change) for change in state.changes()] == ["self.beta is 0.25 after 0.5"]
    own.update(beta=0.5, gamma=1)
    assert [str(change) for change in state.changes()] == ["self.gamma is 1 after absent"]
    del own["gamma"]
    assert state.same()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {"a": 1}, lambda own: own.update(b=2)),
        (lambda: {"a": 1}, lambda own: own.update(a=2)),
        (lambda: {"a": 1}, lambda own: own.clear()),
        (dict, lambda own: own.update(a=1)),
        (lambda: [1, 2], lambda own: own.append(3)),
        (lambda: [1, 2], lambda own: own.reverse()),
        (list, lambda own: own.append(3)),
        (lambda: {1, 2}, lambda own: own.add(3)),
        (lambda: {1}, lambda own: own.discard(1)),
        (lambda: deque([1]), lambda own: own.append(2)),
        (lambda: np.zeros(3), lambda own: own.fill(1)),
    ],
)
def test_containers_are_watched_whole(make: Any, change: Any) -> None:
    own = make()
    state = watched(Items(own, "kept"))
    assert state.same()
    change(own)
    assert not state.same()
    assert all(str(each).startswith("kept") for each in state.changes())
    assert state.changes()


def test_what_was_held_is_put_back() -> None:
    own: dict[str, Any] = {"beta": 0.5}
    inner = [1, 2]
    kept = own, inner
    holders = Names(own, "self"), Items(inner, "inner")
    for name in ("beta", "gamma"):
        holders[0].note(name)
    own.update(beta=1, gamma=2)
    inner.append(3)
    for holder in holders:
        holder.put_back()
    assert kept == ({"beta": 0.5}, [1, 2])


def test_a_cell_is_read_and_put_back() -> None:
    value = 1

    def function() -> int:
        return value

    assert function.__closure__ is not None
    holder = One.cell(function.__closure__[0], "value")
    state = watched(holder)
    value = 2
    assert not state.same()
    value = 1
    assert state.same()


def test_a_place_can_be_left_out_and_read() -> None:
    own: dict[str, Any] = {"beta": 0.5, "gamma": 1}
    state = watched(Names(own, "self"))
    place = state.changes() or (id(own), "beta")
    assert state.reader((id(own), "beta"))() == 0.5
    own["beta"] = 0.25
    assert state.reader((id(own), "beta"))() == 0.25
    assert not state.same()
    assert state.without({place}).same()


def test_what_is_dead_is_not_watched() -> None:
    class Thing:
        pass

    thing = Thing()
    thing.__dict__["beta"] = 1
    holders: dict[Any, Any] = {0: Names(thing.__dict__, "thing")}
    holders[0].note("beta")
    del thing
    assert frozen(holders, ()).dicts == ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.5, "0.5"),
        (MISSING, "absent"),
        ([1, 2], "[1, 2]"),
        (list(range(99)), "a list of 99"),
        (math.sqrt, "sqrt"),
        (object(), "a object"),
        ("x" * 99, "'" + "x" * 56 + "..."),
    ],
)
def test_a_value_is_said_on_one_line(value: Any, said: str) -> None:
    assert brief(value) == said
