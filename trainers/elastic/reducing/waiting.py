"""How a member waits for works of its group without ever being stuck in one."""

import time
from collections.abc import Callable, Sequence

from torch.distributed import Work

from trainers.elastic.reducing.reducing_errors import GroupBroken

FIRST_POLL = 20e-6
LONGEST_POLL = 1e-3
GROWTH = 1.3


def wait(
    works: Sequence[Work],
    alive: Callable[[], None],
    what: str = "a collective",
    longest_poll: float = LONGEST_POLL,
) -> None:
    """Return when every work is complete; raise `GroupBroken` when one of them has failed.

    `alive` is called at every poll and raises when the generation has ended. No call blocks for
    longer than `longest_poll` seconds. `what` names the operation in the error.
    """
    pause = FIRST_POLL
    for work in works:
        while not work.is_completed():
            alive()
            time.sleep(min(pause, longest_poll))
            pause = min(pause * GROWTH, longest_poll)
        raise_failure(work, what)


def raise_failure(work: Work, what: str) -> None:
    """Raise the error of a completed work as `GroupBroken`, if it has one."""
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupBroken(
            f"{what} failed, because a member has died or its connection was cut"
        ) from error
