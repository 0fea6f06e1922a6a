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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainers.elastic.deciding.deal import deal
from trainers.elastic.deciding.header import Header


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
