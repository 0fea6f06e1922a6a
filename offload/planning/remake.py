"""Decides once whether to search for a new plan with the costs of the first steps. Pure.

    copies and kernels took 1.4 times as long      keep
    copies took twice as long, kernels did not     search again:   best is 1 % faster    keep
                                                                   best is 8 % faster    remake

A search takes as long as the first one did. If everything took longer by the same factor, so does
every plan, and their order stays the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GAIN = 0.03
"""A share of a step's seconds. Moving every tensor is not worth less than this."""
SHIFT = 0.1
"""How much a lane's seconds may change, compared with the others', without a new search."""
SMALL = 0.02
"""A share of the busiest lane's seconds. Lanes with less to do decide nothing."""


@dataclass(frozen=True, slots=True)
class PlanMeasurement:
    """What `explain()` says about a plan's first steps."""

    steps: int
    seconds: float
    """Median seconds of a step."""
    before: float
    """The seconds predicted before anything ran."""
    after: float
    """The seconds predicted with the measured tasks and copies."""
    expected: Mapping[str, float]
    """The seconds of every lane that were predicted before."""
    decision: str = ""

    @property
    def text(self) -> str:
        return (
            f"{_ms(self.seconds)} a step (of {self.steps}), predicted {_ms(self.before)}, with"
            f" measured costs {_ms(self.after)}"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to go on, and why in words."""

    yes: bool
    why: str


def search_again(
    before: Mapping[str, float], after: Mapping[str, float], nothing_moves: bool
) -> Decision:
    """Whether to search again. `before`, `after`: seconds of each lane in a step, as estimated
    and as measured. `nothing_moves`: in this plan."""
    if nothing_moves:
        return Decision(False, "kept: there was nothing to choose")
    busiest = max(after.values(), default=0.0)
    factors = {
        lane: after[lane] / before[lane]
        for lane in after
        if before.get(lane, 0.0) > 0 and max(after[lane], before[lane]) >= SMALL * busiest
    }
    if not factors:
        return Decision(False, "kept: nothing was measured")
    slow, quick = max(factors, key=factors.__getitem__), min(factors, key=factors.__getitem__)
    if factors[slow] <= (1 + SHIFT) * factors[quick]:
        return Decision(False, f"kept: every lane took {factors[slow]:.2f}x what was expected")
    return Decision(
        True,
        f"{slow} took {factors[slow]:.2f}x what was expected, {quick} {factors[quick]:.2f}x",
    )


def take_new(kept: float, new: float) -> Decision:
    """Whether to take the best plan of a new search: compares the seconds of a step with each."""
    if new <= (1 - GAIN) * kept:
        return Decision(True, f"remade: {_ms(new)} instead of {_ms(kept)}")
    if new >= kept:
        return Decision(False, "kept: no other plan is faster")
    return Decision(False, f"kept: the best other plan saves {100 * (1 - new / kept):.1f} %")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
