"""What is said of a stream that ended or is elsewhere, and of a view that waits."""

import os
from collections.abc import Sequence

from loaders.errors import PassEnded, SharingError
from loaders.sharing.follower import Follower


def check_other_thread(
    follower: Follower, names: tuple[str, ...], present: Sequence[Follower], window: int
) -> None:
    """Refuse to wait for a view that only the waiting thread itself could read."""
    same = [one.name for one in present if one.thread == follower.thread]
    if mine := [name for name in names if name in same]:
        raise SharingError(
            f"{follower.name} is {window} batches ahead of {mine[0]}, and one thread reads"
            f" both, so it would wait for itself: take batches from {mine[0]} first, close it,"
            " or raise window"
        )


def who_waits(name: str, names: tuple[str, ...], seconds: float, window: int) -> str:
    """Say who has waited for whom."""
    return (
        f"{name} has waited {seconds:.0f} s for {', '.join(names)}, which is"
        f" {window} batches behind: take its batches, close it, or raise window"
    )


def stream_ended(why: str) -> PassEnded:
    """Return the error of a view that asks for a batch after the end."""
    return PassEnded(
        f"{why}: nothing is lost, state_dict() of a view says where it stands; make a"
        " new SharedStream, and load the states into its views"
    )


def in_other_process(who: str, pid: int) -> SharingError:
    """Return the error of a call in a forked process."""
    return SharingError(
        f"{who} belongs to process {pid}, and this is process {os.getpid()}, which"
        " has none of the threads that read: give it a ReuseLoader, which can load the"
        " state_dict() of a view"
    )


def copied_stream() -> SharingError:
    """Return the error of a stream that is copied or pickled."""
    return SharingError(
        "a shared stream cannot be copied or sent to another process, because its batches lie"
        " in this one: send its loader, and make a stream there"
    )
