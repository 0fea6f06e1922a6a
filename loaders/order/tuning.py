"""How often to reuse samples, and how many workers to use: decided purely, from measurements.

    decoding gives D fresh samples a second, training takes S when it is never starved
    reuse r is enough when  r * D >= S * (1 + margin);  with less, 1 - r * D / S  of the time stalls

A larger reuse than that gains nothing and loses information, so the smallest that is enough is
chosen.

    | warm-up | block | block | ... | decide | block | block | ... | look again | ...
                '- sums of 8 batches: some batches decode nothing, some wait for the GPU for others

A window's estimate is the median of its blocks. Later windows change the choice only if three in a
row ask for the same change, and only if the change is clear: more reuse if training already
starves, less if the smaller reuse would leave room beyond the margin. What lies between the two may
be noise.

Noise should not make a choice and then undo it. Let n = S / D be what a window measures. The first
choice and every raise take the least reuse r >= n * (1 + margin). So

    to raise it, later windows must measure more than 1 + margin = 1.10 times this n
    to lower it, later windows must measure less than 1 / (1 + clear) = 1 / 1.15 of this n

Windows that differ by less than 10 % never change the choice, and windows that differ by less than
15 % change it once at most. Noise makes some windows differ by more. If each batch's seconds are
spread evenly over +-20 %, a standard deviation of 11.5 %, the mean of 8 batches has 4.1 %, the
median of 5 such blocks 2.2 %, and the quotient of two such medians 3.1 %. Then one window in 40 is
6 % too high, and one in 40 is 6 % too low: enough, in a long run, for a raise that is undone later.
That is why several windows in a row must agree. Of simulated runs of 1,500 batches, so many changed
the choice more than once:

    windows that agree     noise of +-20 %      of +-30 %
    2                      37 in a million      5 in a thousand
    3                      1 in 3 million       4 in ten thousand
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import inf, isnan
from statistics import median
from typing import Any

MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class PipelineRates:
    """How fast decoding and training could be if neither waited for the other."""

    decode_per_second: float
    """The fresh samples that all workers together deliver in a second while they are busy."""
    step_per_second: float
    """The samples that training takes in a second."""

    def __post_init__(self) -> None:
        for name in ("decode_per_second", "step_per_second"):
            value = getattr(self, name)
            if isnan(value) or value < 0:
                raise ValueError(f"{name} must be 0 or more, not {value}")

    def stall(self, reuse: int) -> float:
        """The share of the time that training waits."""
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
    """The predicted share of the time that training still waits at that reuse."""


def choose_reuse(rates: PipelineRates, most: int, margin: float = MARGIN) -> Choice:
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
        reason = f"{sides}: fresh samples keep up, and reuse would only lose information"
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
class BatchMeasurement:
    """What one batch took."""

    decode_seconds: float
    """The time of decoding, summed over the workers. Waiting for the GIL or a CPU counts too."""
    decoded: int
    """The number of samples that were decoded in these seconds."""
    workers: int
    step_seconds: float
    """The time between the delivery of the batch before and the request for this one."""
    stall_seconds: float
    """The time that the consumer waited inside `next()`."""
    served: int
    """The number of samples in the batch."""


@dataclass(frozen=True, slots=True)
class TuningRules:
    """When to decide, and when to change the decision."""

    margin: float = MARGIN
    warm_up: int = 10
    """This many first batches are ignored: their kernels are new and their files are cold."""
    block: int = 8
    """This many batches are summed into one estimate."""
    window: int = 5
    """The median of this many blocks decides: the first choice comes after 10 + 8 * 5 = 50
    batches."""
    clear: float = 0.15
    """A smaller reuse must leave this much room beyond the margin."""
    agreeing: int = 3
    """This many windows in a row must ask for the same change. The head of this file says why 3."""

    def __post_init__(self) -> None:
        for name in ("block", "window", "agreeing"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("margin", "warm_up", "clear"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")


@dataclass(slots=True)
class _TimedBatches:
    """The sums over the batches of a block."""

    batches: int = 0
    worker_seconds: float = 0.0
    """The sum of decode_seconds / workers: how long decoding took with all workers busy."""
    decoded: int = 0
    step_seconds: float = 0.0
    served: int = 0


@dataclass(slots=True)
class _Seen:
    """What a tuner has seen so far."""

    batches: int = 0
    block: _TimedBatches = field(default_factory=_TimedBatches)
    decode: list[float] = field(default_factory=list)
    """For each block of this window, the seconds that a fresh sample takes with all workers
    busy."""
    step: list[float] = field(default_factory=list)
    """For each block of this window, the seconds that training takes for a sample."""
    reuse: int = 0
    """The latest choice. 0: there was none."""
    asked: int = 0
    """How many windows in a row asked for more reuse (positive) or for less (negative)."""


class ReuseTuner:
    """Chooses the reuse from what each batch took, and chooses again when the rates drift."""

    def __init__(self, most: int, rules: TuningRules | None = None) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, not {most}")
        self.most = most
        self.rules = rules or TuningRules()
        self._seen = _Seen()

    @property
    def reuse(self) -> int | None:
        """The latest choice. None: there was none."""
        return self._seen.reuse or None

    def feed(self, batch: BatchMeasurement) -> Choice | None:
        """Take in what a batch took. Returns a choice if it is the first one, or differs from the
        latest."""
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
        # With much reuse a block may decode nothing. Then it goes on until it does.
        if block.batches < rules.block or not block.decoded or not block.served:
            return None
        seen.decode.append(block.worker_seconds / block.decoded)
        seen.step.append(block.step_seconds / block.served)
        seen.block = _TimedBatches()
        if len(seen.decode) < rules.window:
            return None
        rates = PipelineRates(_per_second(seen.decode), _per_second(seen.step))
        seen.decode, seen.step = [], []
        return self._look(rates)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists of them."""
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
        """Go on as the tuner would have whose state this is."""
        self._seen = _Seen(
            batches=state["batches"],
            block=_TimedBatches(*state["block"]),
            decode=[*state["decode"]],
            step=[*state["step"]],
            reuse=state["reuse"],
            asked=state["asked"],
        )

    def _look(self, rates: PipelineRates) -> Choice | None:
        seen, choice = self._seen, choose_reuse(rates, self.most, self.rules.margin)
        if not seen.reuse:
            seen.reuse = choice.reuse
            return choice
        ask = 0
        if choice.reuse > seen.reuse and rates.stall(seen.reuse) > 0.0:
            ask = 1
        elif choice.reuse < seen.reuse:
            # Choose the smallest reuse whose room is so large that noise will not undo the choice.
            roomy = (1.0 + self.rules.margin) * (1.0 + self.rules.clear) - 1.0
            choice = choose_reuse(rates, seen.reuse, roomy)
            ask = -1 if choice.reuse < seen.reuse else 0
        seen.asked = seen.asked + ask if seen.asked * ask > 0 else ask
        if abs(seen.asked) < self.rules.agreeing:
            return None
        seen.reuse, seen.asked = choice.reuse, 0
        return choice


def available_cpus(affinity: int, quota: tuple[int, int] | None, local_ranks: int) -> int:
    """The number of CPUs that one rank may use. `affinity` is the number that this process may run
    on. `quota` = (q, p) lets its container use q microseconds of CPU time in every p. `local_ranks`
    is the number of ranks that share them."""
    if quota is not None and quota[0] > 0 and quota[1] > 0:
        affinity = min(affinity, -(-quota[0] // quota[1]))
    return max(1, affinity // max(1, local_ranks))


def _per_second(seconds: Sequence[float]) -> float:
    middle = median(seconds)
    return 1.0 / middle if middle else inf
