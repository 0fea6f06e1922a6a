"""Detects that training has stopped getting better. Pure; a recorded run can be replayed offline.

    accuracy   ........::::'''''''''       slope over a window small, `hits` times running -> fire
                          |-window-|

The rule uses slopes (Theil-Sen) and not patience, because patience measures the noise level: the
noisier the curve, the earlier it fires. It only judges under a constant learning rate, because
under a cosine accuracy stalls half-way and climbs again. It watches the two metrics of the thesis
(section 4.4.1): accuracy on held-out samples, and the loss of samples at their first serve. Time is
counted in epoch-equivalents.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from perfect.errors import PhaseError


@dataclass(frozen=True, slots=True)
class Observation:
    """The metrics of a run at epoch-equivalent `at`. Accuracy is a fraction, 0 to 1."""

    at: float
    accuracy: float | None = None
    loss: float | None = None
    """The mean loss of samples at their first serve. They were not seen for a whole pass, so reuse
    does not improve this loss, and it costs no extra forward pass."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The detector's judgement of the latest observation, which is logged."""

    at: float
    fired: bool
    accuracy_slope: float | None
    """Points per epoch-equivalent."""
    loss_slope: float | None
    """Relative change per epoch-equivalent."""
    hits: int
    reason: str


@dataclass(frozen=True, slots=True)
class Look:
    """An observation with the phase that it was made in, and its verdict."""

    phase: str
    reuse: int
    constant_lr: bool
    seen: Observation
    verdict: Verdict | None


def theil_sen(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median of the slopes of all pairs of points."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    i, j = np.triu_indices(len(xs), k=1)
    apart = xs[j] != xs[i]
    return float(np.median((ys[j] - ys[i])[apart] / (xs[j] - xs[i])[apart]))


@dataclass(frozen=True, slots=True)
class PlateauRule:
    """Fires if the slopes over a window are small in `hits` successive checks.

    The defaults come from 200 synthetic curves at three noise levels. A slope below 0.10 points in
    15 points fires at epoch 40-42 at any noise level; patience fires anywhere from 30 to 89.
    """

    window: int = 12
    accuracy_slope: float = 0.10
    """A slope below so many points of accuracy per epoch-equivalent counts as flat."""
    loss_slope: float = 0.015
    """A smaller relative change of the first-serve loss per epoch-equivalent counts as flat. 0.3 %
    would be too strict: samples were seen in earlier passes, so their loss still falls by 1 % when
    the hold-out is flat."""
    hits: int = 2
    not_before: float = 0.0
    """The rule does not fire before this epoch-equivalent."""
    cooldown: int = 3
    """So many observations are ignored after the learning rate or reuse changed."""

    def __post_init__(self) -> None:
        if self.window < 3 or self.hits < 1 or self.cooldown < 0:
            raise PhaseError(
                f"the plateau rule needs window >= 3, hits >= 1, cooldown >= 0, not {self.window},"
                f" {self.hits}, {self.cooldown}"
            )


class PlateauDetector:
    """Says for each `Observation` whether the curve is flat. Its state is a few numbers."""

    def __init__(self, rule: PlateauRule | None = None) -> None:
        self.rule = rule or PlateauRule()
        self._points: list[Observation] = []
        self._hits = 0
        self._skip = self.rule.cooldown

    def changed(self) -> None:
        """Forget all observations, because the learning rate or reuse changed."""
        self._points, self._hits, self._skip = [], 0, self.rule.cooldown

    def observe(self, seen: Observation) -> Verdict:
        rule = self.rule
        values = [v for v in (seen.accuracy, seen.loss) if v is not None]
        if not values or not all(math.isfinite(v) for v in values):
            self._hits = 0
            return Verdict(seen.at, False, None, None, 0, "no finite value: ignored")
        if self._skip:
            self._skip -= 1
            return Verdict(seen.at, False, None, None, 0, "cooling down after a change")
        self._points = [*self._points, seen][-rule.window :]
        if len(self._points) < rule.window:
            reason = f"window fills: {len(self._points)} of {rule.window} points"
            return Verdict(seen.at, False, None, None, 0, reason)
        points = self._points
        up, loss = (
            theil_sen(*zip(*seen_values, strict=True)) if len(seen_values) == rule.window else None
            for seen_values in (
                [(p.at, 100 * p.accuracy) for p in points if p.accuracy is not None],
                [(p.at, math.log(p.loss)) for p in points if p.loss is not None and p.loss > 0],
            )
        )
        flat = (up is None or up < rule.accuracy_slope) and (
            loss is None or abs(loss) < rule.loss_slope
        )
        early = seen.at < rule.not_before
        self._hits = self._hits + 1 if flat and not early else 0
        fired = self._hits >= rule.hits
        slopes = ", ".join(
            text
            for text, value in (
                (f"accuracy {up or 0:+.3f} points/epoch", up),
                (f"first-serve loss {100 * (loss or 0):+.2f} %/epoch", loss),
            )
            if value is not None
        )
        if early:
            slopes += f"; not before epoch {rule.not_before:g}"
        return Verdict(seen.at, fired, up, loss, self._hits, slopes)

    def state_dict(self) -> dict[str, Any]:
        points = [asdict(p) for p in self._points]
        return {"points": points, "hits": self._hits, "skip": self._skip}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._points = [Observation(**p) for p in state["points"]]
        self._hits, self._skip = state["hits"], state["skip"]


def look_from_dict(look: dict[str, Any]) -> Look:
    verdict = Verdict(**look["verdict"]) if look["verdict"] else None
    seen = Observation(**look["seen"])
    return Look(look["phase"], look["reuse"], look["constant_lr"], seen, verdict)
