"""Which reuse keeps up with training, decided purely, from what batches took. It only recommends.

    decoding gives D fresh samples a second, training takes S when it is never starved
    reuse r is enough when  r * D >= S * (1 + margin);  with less, 1 - r * D / S  of the time stalls

    | warm-up | block | block | block | block | block | block | ...      a window is 5 blocks
                '- sums of 8 batches: some batches decode nothing, some wait for the GPU for others

The smallest reuse that is enough is recommended. A window takes the median of its blocks, and a
batch that took PAUSE times as long as others counts as one of those. Only windows in a row that
agree change what is recommended, and only if the change is clear: more if training starves, less
if the smaller reuse would leave room beyond the margin. With n = S / D of a window, later ones must
measure more than 1 + margin = 1.10 times n to raise it, or less than n / (1 + clear) = n / 1.15 to
lower it. So windows that differ by less than 10 % never change it, and those that differ by less
than 15 % change it once at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from statistics import median
from typing import Any

MARGIN = 0.1
PAUSE = 10.0


@dataclass(frozen=True, slots=True)
class PipelineRates:
    """How fast decoding and training could be if neither waited for the other."""

    decode_per_second: float
    """The fresh samples that all workers together deliver in a second while they are busy."""
    step_per_second: float
    """The samples that training takes in a second."""

    def stall(self, reuse: int) -> float:
        """The share of the time that training waits."""
        served = reuse * self.decode_per_second if reuse else 0.0
        return 0.0 if served >= self.step_per_second else 1.0 - served / self.step_per_second

    def enough(self, reuse: int, margin: float) -> bool:
        return reuse * self.decode_per_second >= self.step_per_second * (1.0 + margin)


@dataclass(frozen=True, slots=True)
class Choice:
    """How often to serve a decoded sample, and why."""

    reuse: int
    reason: str


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
    return Choice(reuse, reason)


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
    """The median of this many blocks is what a window measures."""
    clear: float = 0.15
    """A smaller reuse must leave this much room beyond the margin."""
    agreeing: int = 3
    """This many windows in a row must ask for the same change. Two are too few: noise of +-20 %
    raised the reuse and lowered it again in 37 of a million simulated runs."""


@dataclass(slots=True)
class TunerState:
    """What a tuner has seen so far, as plain numbers and lists of them."""

    batches: int = 0
    worker_seconds: float = 0.0
    """Of this block: the sum of decode_seconds / workers."""
    decoded: int = 0
    served: int = 0
    """The number of samples in this block's batches."""
    steps: list[float] = field(default_factory=list)
    """The seconds of each step of this block."""
    decode: list[float] = field(default_factory=list)
    """For each block of this window, the seconds of a fresh sample with all workers busy."""
    step: list[float] = field(default_factory=list)
    """For each block of this window, the seconds that training takes for a sample."""
    reuse: int = 0
    """What is recommended. 0: nothing yet."""
    asked: int = 0
    """How many windows in a row asked for more reuse (positive) or for less (negative)."""


class ReuseTuner:
    """Recommends a reuse by what each batch took, and another one when the rates drift."""

    def __init__(self, most: int, rules: TuningRules | None = None) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, not {most}")
        self.most = most
        self.rules = rules or TuningRules()
        self._seen = TunerState()

    @property
    def reuse(self) -> int | None:
        """What is recommended. None: nothing yet."""
        return self._seen.reuse or None

    def feed(self, batch: BatchMeasurement) -> Choice | None:
        """Take in what a batch took. Returns a choice that is the first one, or another one."""
        seen, rules = self._seen, self.rules
        seen.batches += 1
        if seen.batches <= rules.warm_up:
            return None
        seen.worker_seconds += batch.decode_seconds / batch.workers
        seen.decoded += batch.decoded
        seen.served += batch.served
        seen.steps.append(batch.step_seconds)
        # With much reuse a block may decode nothing. Then it goes on until it does.
        if len(seen.steps) < rules.block or not seen.decoded or not seen.served:
            return None
        seen.decode.append(seen.worker_seconds / seen.decoded)
        seen.step.append(_without_pauses(seen.steps) / seen.served)
        seen.worker_seconds, seen.decoded, seen.served, seen.steps = 0.0, 0, 0, []
        if len(seen.decode) < rules.window:
            return None
        rates = PipelineRates(_per_second(seen.decode), _per_second(seen.step))
        seen.decode, seen.step = [], []
        return self._look(rates)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists of them."""
        return asdict(self._seen)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the tuner would have whose state this is."""
        known = asdict(TunerState())
        copied = asdict(TunerState(**{name: state[name] for name in known if name in state}))
        self._seen = TunerState(**copied)

    def _look(self, rates: PipelineRates) -> Choice | None:
        seen, choice, ask = self._seen, choose_reuse(rates, self.most, self.rules.margin), 0
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
    """The CPUs that one of `local_ranks` ranks may use, of those that this process may run on.
    `quota` = (q, p) lets its container use q microseconds of CPU time in every p."""
    if quota is not None and quota[0] > 0 and quota[1] > 0:
        affinity = min(affinity, -(-quota[0] // quota[1]))
    return max(1, affinity // max(1, local_ranks))


def _without_pauses(steps: Sequence[float]) -> float:
    """The sum of the seconds of a block's steps. A pause counts as a step like the others."""
    typical = median(steps)
    return sum(typical if 0.0 < typical * PAUSE < step else step for step in steps)


def _per_second(seconds: Sequence[float]) -> float:
    middle = median(seconds)
    return 1.0 / middle if middle else inf
