"""Which member computes which lanes of a step: by their speeds, and lanes stay where they were.

    speeds 1 : 2 : 3, 12 lanes    a 2 lanes | b 4 lanes | c 6 lanes

A lane that stays finds its samples in its peer's buffers; one that moves has them decoded again. So
a deal changes the number of a member's lanes only where that makes the step shorter by `WORTH_IT`.
All members come to the same deal, because all know the same headers and the same deal before.

A member whose rate was bad for a while (its machine was busy, or captured a graph) may get no lane,
and without lanes it could never show that it is fast again. So it is taken to be faster with each
step in which it had none, until it gets one and tells its rate anew.
"""

import math
from collections.abc import Mapping, Sequence

WORTH_IT = 0.05
"""A new division of the lanes must shorten the step by this share."""
RECOVERY = 1.02
"""A member without lanes is taken to be so much faster with each step."""
SMOOTHING = 0.3
"""The weight of the last step in a member's rate."""


class LaneRate:
    """How many lanes a second a member computes. The first step does not count: it includes what
    happens once, such as a capture. While the member has no lane the rate stays."""

    def __init__(self) -> None:
        self.rate = 0.0
        """0.0 until it is known."""
        self.idle = 0
        """The steps that have ended since this member computed a lane."""
        self._is_warm = False

    def add_step(self, lanes: int, seconds: float) -> None:
        """Take a time that lanes of one step took."""
        rate = lanes / seconds
        if not self._is_warm:
            self._is_warm = True
        elif not self.rate or self.idle:
            self.rate = rate
        else:
            self.rate = (1 - SMOOTHING) * self.rate + SMOOTHING * rate

    def end_step(self, *, computed: bool) -> None:
        """Count a step that has ended; `computed` says whether this member had lanes of it."""
        self.idle = 0 if computed else self.idle + 1


def deal(
    missing: Sequence[int],
    rates: Mapping[str, float],
    before: Mapping[int, str],
    idle: Mapping[str, int] | None = None,
) -> dict[int, str]:
    """Deal the `missing` lanes to the members that `rates` names.

    `rates`: lanes a second; 0.0 where nobody knows, which counts as the mean of the others.
    `before`: who had which lane last. The members' order decides where all else is equal.
    `idle`: for how many steps members have had no lane."""
    if not rates:
        raise ValueError("there is no member to deal lanes to")
    speeds = believed(rates, idle or {})
    lanes = sorted(missing)
    had = {name: [lane for lane in lanes if before.get(lane) == name] for name in rates}
    kept = {name: len(own) for name, own in had.items()}
    counts = best_counts(len(lanes), speeds)
    if sum(kept.values()) == len(lanes) and _seconds(kept, speeds) <= (
        _seconds(counts, speeds) * (1 + WORTH_IT)
    ):
        counts = kept
    dealt = {lane: name for name, own in had.items() for lane in own[: counts[name]]}
    free = iter([lane for lane in lanes if lane not in dealt])
    for name in rates:
        for _ in range(counts[name] - min(counts[name], len(had[name]))):
            dealt[next(free)] = name
    return dict(sorted(dealt.items()))


def best_counts(lanes: int, speeds: Mapping[str, float]) -> dict[str, int]:
    """The numbers of lanes that end first: each lane goes to who would have it done earliest."""
    counts = {name: int(lanes * speed / sum(speeds.values())) for name, speed in speeds.items()}
    for _ in range(lanes - sum(counts.values())):
        first = min(speeds, key=lambda name: (counts[name] + 1) / speeds[name])
        counts[first] += 1
    return counts


def believed(rates: Mapping[str, float], idle: Mapping[str, int]) -> dict[str, float]:
    """The speeds that a deal goes by. Nobody that has no lane is taken to be faster than usual, so
    members that are too many for the lanes do not take them from each other."""
    told = [rate for name, rate in rates.items() if rate > 0 and not idle.get(name)]
    told = told or [rate for rate in rates.values() if rate > 0]
    usual = sum(told) / len(told) if told else 1.0
    found = {name: rate or usual for name, rate in rates.items()}
    for name, steps in idle.items():
        # Steps are bounded by those that take any rate to the usual one, so no power overflows.
        needed = math.log(max(usual / found[name], 1.0), RECOVERY)
        found[name] = max(found[name], min(usual, found[name] * RECOVERY ** min(steps, needed)))
    return found


def _seconds(counts: Mapping[str, int], speeds: Mapping[str, float]) -> float:
    return max(count / speeds[name] for name, count in counts.items())
