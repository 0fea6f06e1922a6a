"""How often to reuse, and how many workers: from what was measured, decided purely.

    decoding gives D fresh samples a second, training takes S when it is never starved
    reuse r is enough when  r * D >= S * (1 + margin);  with less, 1 - r * D / S  of the time stalls

More than enough buys nothing and costs information, so the smallest that is enough is chosen.

    | warm-up | block | block | ... | decide | block | block | ... | look again | ...
                '- sums of 8 batches: some batches decode nothing, some wait for the GPU for others

A window's estimate is the median of its blocks. Later windows change the choice only where two in a
row ask for it and it is clear: more reuse where training already starves, less where the smaller
one would leave room beyond the margin. Between the two lies what noise can do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import inf, isnan
from statistics import median
from typing import Any

MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Rates:
    """What either side could do if it never waited for the other."""

    decode_per_second: float
    """Fresh samples that all workers together deliver while they are busy."""
    step_per_second: float
    """Samples that training takes."""

    def __post_init__(self) -> None:
        for name in ("decode_per_second", "step_per_second"):
            value = getattr(self, name)
            if isnan(value) or value < 0:
                raise ValueError(f"{name} must be 0 or more, not {value}")

    def stall(self, reuse: int) -> float:
        """Share of the time that training waits."""
        served = reuse * self.decode_per_second
        return 0.0 if served >= self.step_per_second else 1.0 - served / self.step_per_second

    def enough(self, reuse: int, margin: float) -> bool:
        return reuse * self.decode_per_second >= self.step_per_second * (1.0 + margin)


@dataclass(frozen=True, slots=True)
class Choice:
    """How often to serve a decoded sample, and why."""

    reuse: int
    reason: str
    stall_left: float
    """Share of the time that training still waits at that reuse, as predicted."""


def choose_reuse(rates: Rates, most: int, margin: float = MARGIN) -> Choice:
    """The smallest reuse in 1, ..., `most` that keeps up with training."""
    if most < 1:
        raise ValueError(f"most must be at least 1, not {most}")
    reuse = next((r for r in range(1, most) if rates.enough(r, margin)), most)
    stall = rates.stall(reuse)
    sides = (
        f"decoding gives {rates.decode_per_second:.4g} fresh samples/s, training takes"
        f" {rates.step_per_second:.4g}/s"
    )
    if rates.enough(1, margin):
        reason = f"{sides}: fresh samples keep up, reuse would only remove information"
    elif rates.enough(reuse, margin):
        reason = f"{sides}: reuse {reuse} is the least that keeps up with {margin:.0%} to spare"
    elif stall == 0.0:
        reason = f"{sides}: reuse {reuse}, the most allowed, just keeps up"
    else:
        reason = (
            f"{sides}: even reuse {reuse}, the most allowed, leaves it waiting {stall:.0%} of the"
            " time; more workers or smaller pictures would help"
        )
    return Choice(reuse, reason, stall)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one batch took."""

    decode_seconds: float
    """Inside decode, summed over the workers (waiting for the GIL or a CPU there counts)."""
    decoded: int
    """Samples that these seconds decoded."""
    workers: int
    step_seconds: float
    """Between this batch's `next()` and the one after it."""
    stall_seconds: float
    """Waited inside `next()`."""
    served: int


@dataclass(frozen=True, slots=True)
class TuningRules:
    """When to decide, and when to change one's mind."""

    margin: float = MARGIN
    warm_up: int = 10
    """Batches that count for nothing: first kernels, cold files."""
    block: int = 8
    """Batches summed into one estimate."""
    window: int = 5
    """Blocks whose median is looked at: the first choice comes after 10 + 8 * 5 = 50 batches."""
    clear: float = 0.15
    """Room beyond the margin that a smaller reuse must leave."""
    agreeing: int = 2
    """Windows in a row that must ask for the same change."""

    def __post_init__(self) -> None:
        for name in ("block", "window", "agreeing"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("margin", "warm_up", "clear"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")


@dataclass(slots=True)
class _Block:
    batches: int = 0
    worker_seconds: float = 0.0
    """decode_seconds / workers: how long decoding took with all of them busy."""
    decoded: int = 0
    step_seconds: float = 0.0
    served: int = 0


@dataclass(slots=True)
class _Seen:
    batches: int = 0
    block: _Block = field(default_factory=_Block)
    decode: list[float] = field(default_factory=list)
    """Of each block of this window, seconds a fresh sample (all workers busy) ..."""
    step: list[float] = field(default_factory=list)
    """... and seconds that training takes for a sample."""
    reuse: int = 0
    """The latest choice; 0 before the first."""
    asked: int = 0
    """How many windows in a row asked for more (counted up) or for less (counted down)."""


class ReuseTuner:
    """Told what each batch took, says which reuse is right: once, and again when rates drift."""

    def __init__(self, most: int, rules: TuningRules | None = None) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, not {most}")
        self.most = most
        self.rules = rules or TuningRules()
        self._seen = _Seen()

    @property
    def reuse(self) -> int | None:
        """The latest choice."""
        return self._seen.reuse or None

    def feed(self, batch: Measurement) -> Choice | None:
        """A choice, where it is the first or another than before."""
        seen, rules = self._seen, self.rules
        seen.batches += 1
        if seen.batches <= rules.warm_up:
            return None
        block = seen.block
        block.batches += 1
        block.worker_seconds += batch.decode_seconds / batch.workers
        block.decoded += batch.decoded
        block.step_seconds += batch.step_seconds
        block.served += batch.served
        # With much reuse a block may decode nothing: then it has nothing to say yet.
        if block.batches < rules.block or not block.decoded or not block.served:
            return None
        seen.decode.append(block.worker_seconds / block.decoded)
        seen.step.append(block.step_seconds / block.served)
        seen.block = _Block()
        if len(seen.decode) < rules.window:
            return None
        rates = Rates(_per_second(seen.decode), _per_second(seen.step))
        seen.decode, seen.step = [], []
        return self._look(rates)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists of them."""
        seen = self._seen
        return {
            "batches": seen.batches,
            "block": [*astuple(seen.block)],
            "decode": list(seen.decode),
            "step": list(seen.step),
            "reuse": seen.reuse,
            "asked": seen.asked,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on deciding as the tuner would have that the state was taken of."""
        self._seen = _Seen(
            batches=state["batches"],
            block=_Block(*state["block"]),
            decode=[*state["decode"]],
            step=[*state["step"]],
            reuse=state["reuse"],
            asked=state["asked"],
        )

    def _look(self, rates: Rates) -> Choice | None:
        seen, choice = self._seen, choose_reuse(rates, self.most, self.rules.margin)
        if not seen.reuse:
            seen.reuse = choice.reuse
            return choice
        ask = 0
        if choice.reuse > seen.reuse and rates.stall(seen.reuse) > 0.0:
            ask = 1
        elif choice.reuse < seen.reuse:
            # The smallest that leaves so much room that noise will not take it back.
            roomy = (1.0 + self.rules.margin) * (1.0 + self.rules.clear) - 1.0
            choice = choose_reuse(rates, seen.reuse, roomy)
            ask = -1 if choice.reuse < seen.reuse else 0
        seen.asked = seen.asked + ask if seen.asked * ask > 0 else ask
        if abs(seen.asked) < self.rules.agreeing:
            return None
        seen.reuse, seen.asked = choice.reuse, 0
        return choice


def available_cpus(affinity: int, quota: tuple[int, int] | None, local_ranks: int) -> int:
    """CPUs that one rank may count on. `affinity`: how many this process may run on; `quota`:
    (microseconds, of every so many) that its container may use; `local_ranks`: who share them."""
    if quota is not None and quota[0] > 0 and quota[1] > 0:
        affinity = min(affinity, -(-quota[0] // quota[1]))
    return max(1, affinity // max(1, local_ranks))


def _per_second(seconds: Sequence[float]) -> float:
    middle = median(seconds)
    return 1.0 / middle if middle else inf
