"""What a member does next, from the headers of all members of its generation.

    trouble anywhere               -> Stop, all alike
    some applied the step, some not-> the others Apply the total that they hold: the vote was passed
    all hold the same total        -> Apply it: only the answers to the vote did not arrive
    one member holds other weights -> Rejoin: it takes the state from another one
    members are too few            -> ToGate, until others have come
    nothing is begun, and all have heard of the change that the anchor announced -> ToGate
    lanes are missing              -> Compute the own ones among them
    no lane is missing             -> Reduce

A decision is a function of the headers alone, which all members of a generation have alike. What a
member knows beside them, such as a deal that it has made before a generation ended, others may not
know.

The rules keep two laws. A total is applied only if every member that reduced it holds the same one,
so a survivor has it or nobody applied it. And a lane is in the sums of exactly one member.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainers.elastic.deciding.header import Header

WORTH_IT = 0.05
"""A new division of the lanes must shorten the step by this share."""
RECOVERY = 1.02
"""A member without lanes is taken to be so much faster with each step."""
SMOOTHING = 0.3


class LaneRate:
    """How many lanes a second a member computes. The first step does not count: it includes what
    happens once, such as a capture. While the member has no lane the rate stays."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.idle = 0
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
    speeds = believed_speeds(rates, idle or {})
    lanes = sorted(missing)
    had = {name: [lane for lane in lanes if before.get(lane) == name] for name in rates}
    kept = {name: len(had[name]) for name in rates}
    counts = best_counts(len(lanes), speeds)
    if sum(kept.values()) == len(lanes) and _seconds(kept, speeds) <= (
        _seconds(counts, speeds) * (1 + WORTH_IT)
    ):
        counts = kept
    dealt = {lane: name for name in rates for lane in had[name][: counts[name]]}
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


def believed_speeds(rates: Mapping[str, float], idle: Mapping[str, int]) -> dict[str, float]:
    """The speeds that a deal goes by. Nobody that has no lane is taken to be faster than usual, so
    members that are too many for the lanes do not take them from each other."""
    known = [rate for name, rate in rates.items() if rate > 0 and not idle.get(name)]
    known = known or [rate for rate in rates.values() if rate > 0]
    usual = sum(known) / len(known) if known else 1.0
    speeds = {name: rate or usual for name, rate in rates.items()}
    for name, steps in idle.items():
        # Steps are bounded by those that take any rate to the usual one, so no power overflows.
        needed = math.log(max(usual / speeds[name], 1.0), RECOVERY)
        recovered = speeds[name] * RECOVERY ** min(steps, needed)
        speeds[name] = max(speeds[name], min(usual, recovered))
    return speeds


def _seconds(counts: Mapping[str, int], speeds: Mapping[str, float]) -> float:
    return max(count / speeds[name] for name, count in counts.items())


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute these lanes, in this order, and exchange headers again."""

    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Add the sums of the contributors in the order of their ranks, and vote."""

    contributors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the total that is held: every member holds or has applied it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Exchange headers again: others catch up by one step first."""


@dataclass(frozen=True, slots=True)
class ToGate:
    """Go to the gate: the next generation goes on with this step, and newcomers are in it."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """This member differs from the others, and has to take the state from one of them."""

    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run at every member."""

    why: str


Decision = Compute | Reduce | Apply | Wait | ToGate | Rejoin | Stop


def decide(headers: Sequence[Header], rank: int, lanes: Sequence[int], least: int = 1) -> Decision:
    """`headers` by rank; `lanes`: those of this step that have samples; `least`: so many members
    there must be."""
    mine = headers[rank]
    if troubles := [f"{h.name}: {h.trouble}" for h in headers if h.trouble]:
        return Stop("; ".join(troubles))
    first, last = min(h.step for h in headers), max(h.step for h in headers)
    if first < last:
        return _catch_up(headers, mine, first, last)
    if odd := _members_with_other_weights(headers):
        return _settle_difference(headers, mine, odd)
    if mine.held and all(h.held == mine.held for h in headers):
        return Apply()
    if problem := _computed_twice(headers):
        return Stop(problem)
    begun = any(h.done for h in headers)
    if len(headers) < least or (not begun and all(h.announced for h in headers)):
        return ToGate()
    missing = sorted({*lanes}.difference(*(h.done for h in headers)))
    if missing:
        before = {lane: h.name for h in reversed(headers) for lane in h.had}
        rates = {h.name: h.pace.rate for h in headers}
        idle = {h.name: h.pace.idle for h in headers}
        dealt = deal(missing, rates, before, idle)
        return Compute(tuple(lane for lane, name in dealt.items() if name == mine.name))
    return Reduce(tuple(number for number, h in enumerate(headers) if h.done))


def is_equal_vote(digests: Sequence[str]) -> bool:
    """Whether every member holds the same total."""
    return len({*digests}) == 1


def _catch_up(headers: Sequence[Header], mine: Header, first: int, last: int) -> Decision:
    """Some have applied the step and others not yet."""
    if last - first > 1:
        return Stop(
            f"members are {last - first} steps apart, at {first} and {last}, which no rule allows:"
            " send the logs of the peers to the developers"
        )
    committed = {h.kept for h in headers if h.step == last}
    if len(committed) > 1:
        return Stop(f"two totals of step {first} were applied: {sorted(committed)}")
    if mine.step == last:
        return Wait()
    if mine.held in committed:
        return Apply()
    return Rejoin(f"step {first} was committed by others, and its total is not here")


def _members_with_other_weights(headers: Sequence[Header]) -> list[str]:
    """Return the members whose weights differ from those of the majority; all if there is none."""
    weights = Counter(h.weights for h in headers if h.weights)
    if len(weights) < 2:
        return []
    (most, votes), (_, second) = weights.most_common(2)
    if votes == second:
        return [h.name for h in headers]
    return [h.name for h in headers if h.weights not in ("", most)]


def _settle_difference(headers: Sequence[Header], mine: Header, odd: Sequence[str]) -> Decision:
    if len(odd) == len(headers):
        return Stop(
            f"the weights of {', '.join(odd)} differ before step {mine.step + 1}, and no majority"
            " says whose are right: begin again from a checkpoint"
        )
    if mine.name in odd:
        others = len(headers) - len(odd)
        return Rejoin(f"the weights here differ from those of {others} other members")
    return Wait()


def _computed_twice(headers: Sequence[Header]) -> str:
    counts = Counter(lane for h in headers for lane in h.done)
    if twice := sorted(lane for lane, count in counts.items() if count > 1):
        return f"lanes {twice} were computed by two members: send their logs to the developers"
    return ""
