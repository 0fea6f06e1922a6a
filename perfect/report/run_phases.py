"""Draws the phases of a run, shaded, and its switches behind every curve.

    pretrain, reuse 3     | finetune, fresh          labels, above the first panel
    #######################                          the more reuse, the darker
    #######################:                         a dashed line: a switch, with its reason
    0                    750                  1200

All figures of a run have the same phases behind them, on an axis of steps or of seconds. A phase
ends where the next one begins; the end of the last phase is the run's end, and not a switch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from perfect.report.metrics import Metrics
from perfect.report.panels import BLUE, INK, MUTED, RULE, WIDTH, put_text
from perfect.report.words import TIMES


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase, from step `start` to step `end`."""

    name: str
    reuse: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A switch, at a step."""

    step: float
    text: str


@dataclass(frozen=True, slots=True)
class RunPhases:
    """The phases and switches of a run, which are drawn behind every curve."""

    spans: Sequence[PhaseSpan] = ()
    marks: Sequence[Mark] = ()

    @classmethod
    def from_rows(
        cls,
        phases: Sequence[Mapping[str, Any]],  # Any: rows of run.json
        switches: Sequence[Mapping[str, Any]],
    ) -> "RunPhases":
        starts = [p["first_step"] for p in phases]
        ends = [*starts[1:], *(p["last_step"] + 1 for p in phases[-1:])]
        spans = [
            PhaseSpan(str(phase["name"]), phase["reuse"], start, end)
            for phase, start, end in zip(phases, starts, ends, strict=True)
        ]
        # No phase follows the last one: its end is the run's end, and not a switch.
        entered = [s for s in switches if s.get("entered") is not None]
        return cls(spans, [Mark(s["step"], f"switch: {s['reason']}") for s in entered])

    def over_seconds(self, metrics: Metrics) -> "RunPhases":
        """Return the same phases on an axis of seconds."""
        steps, seconds = metrics.pairs("step", "wall_seconds")

        def when(step: float) -> float:
            return float(np.interp(step, steps, seconds))

        spans = [PhaseSpan(s.name, s.reuse, when(s.start), when(s.end)) for s in self.spans]
        return RunPhases(spans, [Mark(when(m.step), m.text) for m in self.marks])

    def draw(self, below: Sequence[Axes], end: float, mark_text: bool = False) -> None:
        """Shade the panels up to `end`. Name the phases above the first panel, the marks in it."""
        start, stop = 0.0, end if end > 0 else 1.0
        for axes in below:
            axes.set_xlim(start, stop)
            axes.locator_params("x", integer=True)
            for i, span in enumerate(self.spans):
                shade = 0.0 if span.reuse <= 1 else min(0.02 + 0.022 * span.reuse, 0.18)
                axes.axvspan(span.start, span.end, color=BLUE, alpha=shade, linewidth=0)
                if i:
                    axes.axvline(span.start, color=RULE, linewidth=0.8)
            for mark in self.marks:
                axes.axvline(mark.step, color=INK, linewidth=0.9, dashes=(3, 2))
        if not below:
            return
        for span in self.spans:
            room = (min(span.end, stop) - span.start) / stop * 72 * (WIDTH - 0.7)
            told = (
                f"{span.name}, {_reuse(span.reuse)}",
                _reuse(span.reuse),
                f"{TIMES}{span.reuse}",
            )
            label = next((t for t in told if 5.0 * len(t) + 4 < room), "")
            put_text(below[0], span.start / stop, 1.0, label, (3, 4), color=MUTED, va="bottom")
        for i, mark in enumerate(self.marks if mark_text else ()):
            right = mark.step < 0.6 * stop
            offset = (5 if right else -5, 5 + 12 * (i % 4))
            side = "left" if right else "right"
            put_text(below[0], mark.step / stop, 0.0, mark.text, offset, ha=side, va="bottom")


def _reuse(times: int) -> str:
    return "fresh" if times == 1 else f"reuse {times}"
