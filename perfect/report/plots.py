"""Draws the figures of a run as SVG text for a page.

    metrics.csv --> Metrics --> learning_curves   accuracy | loss              over steps
                                learning_rate                                  over steps
                                input_pipeline    served, decoded | stall      over seconds
    trace of the rule --------> plateau_trace     slopes and thresholds        over epochs

The run's phases (perfect/report/plots.py) are drawn behind all but the last. A figure that
would be empty is None. Training is orange and hold-out is blue everywhere.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from perfect.report.panels import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    RULE,
    WIDTH,
    draw_line,
    panels,
    put_text,
    put_title,
    to_svg,
)
from perfect.report.results import Column, Metrics, rates
from perfect.report.words import TIMES

Rows = Sequence[Mapping[str, Any]]  # Any: rows of run.json


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
    def from_rows(cls, phases: Rows, switches: Rows) -> "RunPhases":
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
            texts = (
                f"{span.name}, {_reuse(span.reuse)}",
                _reuse(span.reuse),
                f"{TIMES}{span.reuse}",
            )
            label = next((t for t in texts if 5.0 * len(t) + 4 < room), "")
            put_text(below[0], span.start / stop, 1.0, label, (3, 4), color=MUTED, va="bottom")
        for i, mark in enumerate(self.marks if mark_text else ()):
            right = mark.step < 0.6 * stop
            offset = (5 if right else -5, 5 + 12 * (i % 4))
            side = "left" if right else "right"
            put_text(below[0], mark.step / stop, 0.0, mark.text, offset, ha=side, va="bottom")


def _reuse(times: int) -> str:
    return "fresh" if times == 1 else f"reuse {times}"


def learning_curves(
    metrics: Metrics, run_phases: RunPhases, steps: float, test_accuracy: float | None = None
) -> str | None:
    """Draw accuracy above and loss below. `test_accuracy` (0 to 1) is a diamond."""
    accuracy, loss = metrics.pairs("step", "val_accuracy"), metrics.pairs("step", "train_loss")
    held_out = metrics.pairs("step", "val_loss")
    has_loss = len(loss[0]) + len(held_out[0]) > 0
    has_accuracy = len(accuracy[0]) > 0 or test_accuracy is not None
    if not has_loss and not has_accuracy:
        return None
    with panels([2.25] * (has_loss + has_accuracy), gap=0.34, top=0.5) as (figure, axes):
        if has_accuracy:
            draw_line(axes[0], accuracy[0], 100 * accuracy[1], BLUE)
            keys = [("hold-out", BLUE)] if len(accuracy[0]) else []
            if test_accuracy is not None:
                axes[0].plot(steps, 100 * test_accuracy, "D", color=INK, ms=5.5, clip_on=False)
                keys.append(("◆ test, final weights", INK))
            axes[0].set_ylim(top=min(100, axes[0].get_ylim()[1]))
            put_title(axes[0], "Accuracy, %", keys, above_labels=True)
        if has_loss:
            _loss(axes[-1], metrics, loss, held_out, above_labels=not has_accuracy)
        run_phases.draw(axes, steps, mark_text=True)
        axes[-1].set_xlabel("optimizer step")
        return to_svg(figure, "Accuracy and loss over optimizer steps")


def _loss(
    axes: Axes,
    metrics: Metrics,
    train: tuple[Column, Column],
    held_out: tuple[Column, Column],
    above_labels: bool,
) -> None:
    smooth = len(train[0]) >= 120
    axes.plot(*train, color=ORANGE, alpha=0.3 if smooth else 1, linewidth=0.8 if smooth else 1.6)
    if smooth:
        blocks = len(train[0]) // max(10, len(train[0]) // 120)
        middle = [np.median(part) for part in np.array_split(train[1], blocks)]
        centre = [part.mean() for part in np.array_split(train[0], blocks)]
        axes.plot(centre, middle, color=ORANGE)
    elif len(train[0]) == 1:
        axes.plot(*train, "o", color=ORANGE, ms=4)
    keys = [("training (median)" if smooth else "training", ORANGE)] if len(train[0]) else []
    if len(held_out[0]):
        draw_line(axes, *held_out, BLUE)
        keys.append(("hold-out", BLUE))
    values = np.concatenate([train[1], held_out[1]])
    if values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    broken = metrics.first_not_finite("train_loss")
    if broken is not None:
        keys.append((f"not a finite number at step {broken}", INK))
    put_title(axes, "Loss", keys, above_labels)


def learning_rate(
    metrics: Metrics, phases: Rows, run_phases: RunPhases, steps: float
) -> str | None:
    """Draw the rates that were logged, and those with which phases began and ended."""
    x, y = metrics.pairs("step", "lr")
    ends = [
        (phase[f"{at}_step"], phase[f"lr_{of}"])
        for phase in phases
        for at, of in (("first", "start"), ("last", "end"))
        if phase.get(f"lr_{of}") is not None
    ]
    x = np.concatenate([x, [step for step, _ in ends]])
    y = np.concatenate([y, [rate for _, rate in ends]])
    if not len(x):
        return None
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    with panels([1.35]) as (figure, (axes,)):
        draw_line(axes, x, y, GREEN, dots=False)
        axes.set_ylim(0, max(y.max() * 1.08, 1e-12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        run_phases.draw([axes], steps)
        axes.set_xlabel("optimizer step")
        return to_svg(figure, "Learning rate over optimizer steps")


def input_pipeline(metrics: Metrics, run_phases: RunPhases) -> str | None:
    """Draw the samples decoded and served per second, and the share of waiting."""
    seen = rates(metrics)
    if seen is None:
        return None
    with panels([1.7, 1.1], gap=0.34, top=0.5) as (figure, axes):
        where = np.repeat(seen.seconds, 2)[1:-1]
        # Without reuse both lines are the same; then the thin one is visible inside the thick one.
        for values, colour, wide in ((seen.served, BLUE, 2.4), (seen.decoded, ORANGE, 1.1)):
            axes[0].plot(where, np.repeat(values, 2), color=colour, linewidth=wide)
        axes[0].set_ylim(bottom=0)
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        stalled = np.repeat(100 * seen.stalled, 2)
        axes[1].fill_between(where, stalled, color=INK, alpha=0.18, linewidth=0)
        axes[1].plot(where, stalled, color=INK, linewidth=1.1)
        axes[1].set_ylim(0, 100)
        keys = [("served", BLUE), ("decoded", ORANGE)]
        put_title(axes[0], "Samples per second", keys, above_labels=True)
        put_title(axes[1], "Waiting for decoding, % of the time", [])
        run_phases.over_seconds(metrics).draw(axes, float(seen.seconds.max()))
        axes[1].set_xlabel("seconds since the run began")
        return to_svg(figure, "Samples decoded and served per second, and stall share")


def plateau_trace(
    verdicts: Rows, accuracy_below: float | None, loss_below: float | None
) -> str | None:
    """Draw the slopes over epochs. Inside the bands the rule calls a curve flat."""
    accuracy, loss = (
        [
            (v["at"], scale * v[key], bool(v.get("fired")))
            for v in verdicts
            if v.get(key) is not None
        ]
        for key, scale in (("accuracy_slope", 1), ("loss_slope", 100))
    )
    if not accuracy and not loss:
        return None
    loss_limit = None if loss_below is None else 100 * loss_below
    accuracy_low = None if accuracy_below is None else -math.inf
    loss_low = None if loss_limit is None else -loss_limit
    drawn = [
        (points, title, limits)
        for points, title, limits in (
            (accuracy, "Hold-out accuracy, points per epoch", (accuracy_low, accuracy_below)),
            (loss, "First-serve loss, % per epoch", (loss_low, loss_limit)),
        )
        if points
    ]
    ats = [at for points, _, _ in drawn for at, _, _ in points]
    with panels([1.45] * len(drawn), gap=0.42) as (figure, axes):
        for panel, (points, title, limits) in zip(axes, drawn, strict=True):
            _slopes(panel, points, limits)
            put_title(panel, title, [])
            margin = 0.03 * (max(ats) - min(ats)) or 0.5
            panel.set_xlim(min(ats) - margin, max(ats) + margin)
        axes[-1].set_xlabel("epoch-equivalents served")
        return to_svg(figure, "Slopes that the plateau rule saw, against its thresholds")


def _slopes(
    axes: Axes,
    points: Sequence[tuple[float, float, bool]],
    limits: tuple[float | None, float | None],
) -> None:
    x, y, fired = (np.array(column) for column in zip(*points, strict=True))
    low, high = limits
    # Early slopes are a hundred times the threshold, so the axis is logarithmic beyond it.
    linear = high or float(np.abs(y).max()) or 1.0
    axes.set_yscale("symlog", linthresh=linear, linscale=0.8)
    axes.axhline(0, color=RULE, linewidth=0.8)
    axes.plot(x, y, color=BLUE, linewidth=1.2)
    axes.plot(x, y, "o", color=BLUE, ms=3.2)
    bottom, top = axes.get_ylim()
    if low is not None and high is not None:
        bottom, top = min(bottom, -1.6 * high), max(top, 1.6 * high)
        axes.axhspan(max(low, bottom), high, color=GREEN, alpha=0.13, linewidth=0)
        for limit in (low, high):
            if math.isfinite(limit):
                axes.axhline(limit, color=GREEN, linewidth=0.9)
        axes.annotate(
            f"flat: {'within ±' if math.isfinite(low) else 'below '}{high:g}", (1, high),
            xycoords=("axes fraction", "data"), xytext=(-4, 3), textcoords="offset points",
            ha="right", va="bottom", color="#00694d",
        )  # fmt: skip
    axes.plot(x[fired], y[fired], "D", color=INK, ms=6)
    axes.set_ylim(bottom, top)
    beyond = [s * 10.0**k for k in range(-6, 7) for s in (1, -1) if 10.0**k > 1.2 * linear]
    axes.yaxis.set_major_locator(FixedLocator([0, *(t for t in beyond if bottom <= t <= top)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
