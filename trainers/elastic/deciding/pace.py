"""Whether a newcomer that follows the commits keeps pace, or holds the swarm up for too long.

A newcomer that takes totals more slowly than they are made lets the swarm wait for it. It may do so
for a moment, and then for a share of the time in which it comes in. As a member it would do the
same at every step, so beyond that it is refused, with the numbers.
"""

from dataclasses import dataclass

HELD_SECONDS = 3.0
"""On a busy machine a newcomer may stumble once, and is refused for good after that."""
SETUP_SECONDS = 5.0
"""A newcomer that has the state prepares itself for the first step. It takes no totals meanwhile,
and that says nothing about its pace."""
HELD_SHARE = 0.2
"""While a newcomer comes in, the swarm's steps may take longer by this share."""
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Following:
    """What a donor has measured of one newcomer."""

    seconds: float
    """Since it began to take the state, to prepare itself, or to follow."""
    held: float
    """So many of them the swarm has waited for this newcomer."""
    taken: int
    """The bytes that it has taken."""
    commits: int
    """The commits that the swarm has made."""
    commit_bytes: int
    lanes: int
    """Of a step."""
    lane_rate: float
    """The lanes a second that the donor computes; 0 where it has computed none."""
    prepares: bool = False
    """Whether it has the state, and does not follow yet."""


def seconds_left(following: Following) -> float:
    """Return how long the swarm may still wait for this newcomer; 0 or less if it may not."""
    at_once = SETUP_SECONDS if following.prepares else HELD_SECONDS
    return at_once + HELD_SHARE * following.seconds - following.held


def too_slow(following: Following) -> str:
    """Say by what a newcomer is too slow: what it takes, what it could compute, what is needed."""
    takes = max(following.taken, 1) / following.seconds
    step = (following.seconds - following.held) / max(following.commits, 1)
    total = following.commit_bytes / takes
    lanes = min(int(max(0.0, step - total) * following.lane_rate), following.lanes)
    return (
        f"this newcomer is too slow for the swarm, which has waited {following.held:.1f} s for it:"
        f" it takes {_rate(takes)}, so the total of a step in {total:.3g} s, and the swarm makes a"
        f" step in {step:.3g} s. That leaves it time for {lanes} of {following.lanes} lanes. It"
        f" needs {_rate(following.commit_bytes / step)} or more: give it a faster link or machine,"
        " or a larger global batch, whose steps take longer"
    )


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / MEGABYTE:.3g} MB/s"
