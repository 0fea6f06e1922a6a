"""What a view of a shared stream does next, told by marks alone."""

import pytest

from loaders.sharing.lockstep import (
    Action,
    Mark,
    ReadAlone,
    ReadNext,
    TakeKept,
    WaitFor,
    next_action,
    oldest_needed,
)

KEPT = [(2, 4), (2, 5), (2, 6)]
FOLLOWING = (2, 7)


@pytest.mark.parametrize(
    "marks, action",
    [
        ({"me": (2, 5), "a": (2, 4)}, TakeKept()),
        ({"me": (2, 7), "a": (2, 4)}, ReadNext()),
        ({"me": (2, 9), "a": (2, 4)}, ReadNext()),
        ({"me": (3, 0), "a": (2, 4)}, ReadNext()),
        ({"me": (2, 3), "a": (2, 4)}, ReadAlone()),
        ({"me": (4, 0), "a": (2, 4)}, ReadAlone()),
        ({"me": (3, 0)}, ReadNext(begin=(3, 0))),
        ({"me": (9, 5), "a": (8, 1)}, ReadNext(begin=(8, 1))),
        ({"me": (9, 5), "a": (7, 1)}, ReadAlone()),
        ({"me": (1, 5), "a": (1, 3)}, ReadNext(begin=(1, 3))),
    ],
    ids=[
        "the batch is kept",
        "the batch follows",
        "a later batch of the pass",
        "the next pass",
        "a batch that was dropped",
        "more than a pass ahead",
        "nobody needs what would follow",
        "so the lowest mark is next",
        "and who is more than a pass ahead of it reads alone",
        "everybody is behind",
    ],
)
def test_where_the_views_stand_says_what_is_next(marks: dict[str, Mark], action: Action) -> None:
    assert next_action("me", marks, KEPT, FOLLOWING, window=9) == action


def test_a_full_window_names_those_that_are_waited_for() -> None:
    marks = {"me": (2, 7), "a": (2, 4), "b": (2, 5), "c": (2, 4), "d": (2, 1)}
    assert next_action("me", marks, KEPT, FOLLOWING, window=3) == WaitFor(("a", "c"))
    assert next_action("me", marks, KEPT, FOLLOWING, window=4) == ReadNext()


def test_a_stream_begins_where_its_slowest_view_stands() -> None:
    marks = {"me": (1, 8), "a": (1, 2)}
    assert next_action("me", marks, [], None, window=1) == ReadNext(begin=(1, 2))
    assert oldest_needed(marks.values(), [], None) == (1, 2)


def test_a_batch_is_needed_by_nobody_who_is_behind_it() -> None:
    assert oldest_needed([(2, 1), (2, 5)], KEPT, FOLLOWING) == (2, 5)
    assert oldest_needed([(2, 1)], KEPT, FOLLOWING) is None
    assert oldest_needed([(2, 1), (2, 7)], [], FOLLOWING) == (2, 7)
