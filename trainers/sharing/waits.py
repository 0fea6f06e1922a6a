"""How long requests of high priority took, and what they cost the training beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

SHARES = (0.5, 0.95)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of some seconds. NaN where there are none."""

    p50: float
    p95: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        if not seconds:
            return cls(*[float("nan")] * 3)
        ordered = sorted(seconds)
        p50, p95 = (ordered[ceil(share * len(ordered)) - 1] for share in SHARES)
        return cls(p50, p95, ordered[-1])

    def said(self) -> str:
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
        """Return what loggers get, in milliseconds."""
        if not self.answers:
            return {}
        found = {f"{name}/requests": float(len(self.answers))}
        for what, seconds in (("start", self.starts), ("answer", self.answers)):
            them = Percentiles.of(seconds)
            for key, value in (("p50", them.p50), ("p95", them.p95), ("max", them.most)):
                found[f"{name}/{what}_{key}_ms"] = 1e3 * value
        return found | {f"{name}/training_stood_aside_s": self.stood_aside}

    def said(self) -> str:
        """Return one line."""
        if not self.answers:
            return "no request was made"
        start, answer = Percentiles.of(self.starts), Percentiles.of(self.answers)
        return (
            f"{len(self.answers)} requests; p50 / p95 / max:"
            f" {start.said()} to the start, {answer.said()} to the answer; the training stood"
            f" aside for {self.stood_aside:.2f} s"
        )
