"""Whether a plan is made anew with the costs of its first steps: once, and where it pays. Pure.

    copies and kernels took 1.4 times as long      keep
    copies took twice as long, kernels did not     search again:   best is 1 % faster    keep
                                                                   best is 8 % faster    remake

A search costs as much as the first one did. Where everything took longer by the same factor, every
plan does, and the order of merit of the plans that were tried stays as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GAIN = 0.03
"""Of a step's seconds: a plan that saves less is not worth moving every tensor."""
SHIFT = 0.1
"""So much one engine's seconds may change, compared with the others', before it is asked again."""
SMALL = 0.02
"""Of the busiest engine's seconds: an engine that has less to do decides nothing."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What `explain()` tells of a plan's first steps."""

    steps: int
    seconds: float
    """A step took: the median."""
    before: float
    """Predicted before anything ran."""
    after: float
    """Predicted with what each task and copy took."""
    expected: Mapping[str, float]
    """Seconds of every engine, as predicted before."""
    decision: str = ""

    @property
    def text(self) -> str:
        return (
            f"{_ms(self.seconds)} a step (of {self.steps}), predicted {_ms(self.before)}, with"
            f" measured costs {_ms(self.after)}"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to go on, and in words."""

    yes: bool
    why: str


def search_again(before: Mapping[str, float], after: Mapping[str, float], alone: bool) -> Decision:
    """`before`, `after`: seconds of every engine in a step, as estimated and as measured. `alone`:
    in this plan nothing moves."""
    if alone:
        return Decision(False, "kept: there was nothing to choose")
    busiest = max(after.values(), default=0.0)
    factors = {
        engine: after[engine] / before[engine]
        for engine in after
        if before.get(engine, 0.0) > 0 and max(after[engine], before[engine]) >= SMALL * busiest
    }
    if not factors:
        return Decision(False, "kept: nothing was measured")
    slow, quick = max(factors, key=factors.__getitem__), min(factors, key=factors.__getitem__)
    if factors[slow] <= (1 + SHIFT) * factors[quick]:
        return Decision(False, f"kept: every engine took {factors[slow]:.2f}x what was expected")
    return Decision(
        True,
        f"{slow} took {factors[slow]:.2f}x what was expected, {quick} {factors[quick]:.2f}x",
    )


def take_new(kept: float, new: float) -> Decision:
    """Seconds of a step with the plan that there is and with the best of the new search."""
    if new <= (1 - GAIN) * kept:
        return Decision(True, f"remade: {_ms(new)} instead of {_ms(kept)}")
    if new >= kept:
        return Decision(False, "kept: no other plan is faster")
    return Decision(False, f"kept: the best other plan saves {100 * (1 - new / kept):.1f} %")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
