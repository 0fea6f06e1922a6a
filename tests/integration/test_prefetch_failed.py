"""What the decoding threads still do after a pass has failed."""

import threading
from collections.abc import Sequence

import pytest
from integration.test_prefetch import pool, serve, work


def test_after_a_failure_nothing_of_the_next_pass_is_decoded() -> None:
    followed, ahead = threading.Event(), threading.Event()

    def fail(positions: Sequence[int], slots: Sequence[int]) -> None:
        assert followed.wait(60)
        raise KeyError(positions[0])

    ours = pool(slots=4)
    ours.begin(work(1, fail))
    ours.plan(0, serve(0))
    ours.follow(work(4, lambda p, s: ahead.set()))
    followed.set()
    with pytest.raises(KeyError):
        ours.take()
    assert not ahead.wait(0.2)
    ours.close()
