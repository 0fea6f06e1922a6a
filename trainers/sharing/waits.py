"""How long requests of high priority took, and what they cost the training beside them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

SHARES = (0.5, 0.95)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of some seconds. NaN if there are none."""

    p50: float
    p95: float
    most: float

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> "Percentiles":
        if not seconds:
            return cls(*[float("nan")] * 3)
        ordered = sorted(seconds)
        p50, p95 = (ordered[ceil(share * len(ordered)) - 1] for share in SHARES)
        return cls(p50, p95, ordered[-1])

    def describe(self) -> str:
        p50, p95, most = (1e3 * value for value in (self.p50, self.p95, self.most))
        return f"{p50:.1f} / {p95:.1f} / {most:.1f} ms"


@dataclass(frozen=True, slots=True)
class Waits:
    """All requests so far."""

    starts: Sequence[float]
    """Seconds from each request to the moment when it had the device."""
    answers: Sequence[float]
    """Seconds from each request to its answer."""
    stood_aside: float
    """Seconds in which the training could have run, and stood aside."""

    def metrics(self, name: str = "sharing") -> dict[str, float]:
        """Return the metrics for loggers, in milliseconds."""
        if not self.answers:
            return {}
        metrics = {f"{name}/requests": float(len(self.answers))}
        for what, seconds in (("start", self.starts), ("answer", self.answers)):
            times = Percentiles.of_seconds(seconds)
            for key, value in (("p50", times.p50), ("p95", times.p95), ("max", times.most)):
                metrics[f"{name}/{what}_{key}_ms"] = 1e3 * value
        return metrics | {f"{name}/training_stood_aside_s": self.stood_aside}

    def describe(self) -> str:
        """Return one line."""
        if not self.answers:
            return "no request was made"
        start, answer = Percentiles.of_seconds(self.starts), Percentiles.of_seconds(self.answers)
        return (
            f"{len(self.answers)} requests; p50 / p95 / max:"
            f" {start.describe()} to the start, {answer.describe()} to the answer; the training"
            f" stood aside for {self.stood_aside:.2f} s"
        )


class RequestTimes:
    """Collects the times of requests, from any thread."""

    def __init__(self, stood_aside: float) -> None:
        """`stood_aside`: the seconds for which steps had stood aside before."""
        self._stood_aside = stood_aside
        self._starts: list[float] = []
        self._answers: list[float] = []
        self._lock = threading.Lock()

    def add(self, start: float, answer: float) -> None:
        with self._lock:
            self._starts.append(start)
            self._answers.append(answer)

    def summary(self, stood_aside: float) -> Waits:
        with self._lock:
            starts, answers = tuple(self._starts), tuple(self._answers)
        return Waits(starts, answers, stood_aside - self._stood_aside)
