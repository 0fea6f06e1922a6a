"""Draws the accuracy of every run over steps, decoded samples and seconds, in one figure.

    Accuracy, %
    |    __--o |     __-o |  __--o        a curve is a run's hold-out; o: its final weights
    |  _/      |   _/     | /
    +--------- +--------- +--------       one axis of accuracy, three of cost
      steps      decoded    seconds

A run has the same colour and the same dashes everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from perfect.report.metrics import Column
from perfect.report.page import Html
from perfect.report.panels import BLUE, GREEN, ORANGE, draw_line, panels, put_title, to_svg
from perfect.report.results import Run

COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#4d4d4d")
DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2))


@dataclass(frozen=True, slots=True)
class Curve:
    """The hold-out accuracy of a run (0 to 1) over a cost, and the point of its final weights."""

    x: Column
    y: Column
    end: tuple[float, float] | None


AXES = (
    ("optimizer step", "step", "steps"),
    ("samples decoded", "decoded", "decoded_samples"),
    ("seconds", "wall_seconds", "wall_seconds"),
)


def curve(run: Run, column: str, total: str) -> Curve:
    """Return accuracy over a column. If a row of validation lacks the column, its value is
    interpolated between the rows around it."""
    steps, accuracy = run.metrics.pairs("step", "val_accuracy")
    known, values = run.metrics.pairs("step", column)
    if not len(known):
        steps, accuracy = steps[:0], accuracy[:0]
    # The curve begins at (0, 0), as nothing is decoded before the first step.
    x = np.interp(steps, np.concatenate([[0.0], known]), np.concatenate([[0.0], values]))
    last, final = run.number(total), run.number("accuracy")
    return Curve(x, accuracy, None if last is None or final is None else (last, final))


def accuracy_figure(runs: Sequence[Run]) -> str | None:
    """Draw panels side by side with one axis of accuracy. Each has a curve for every run."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = [[curve(run, column, total) for run in runs] for _, column, total in AXES]
    if not any(len(c.x) or c.end for curves in drawn for c in curves):
        return None
    with panels([3.2], columns=len(AXES)) as (figure, axes):
        for panel, curves, (label, _, _) in zip(axes, drawn, AXES, strict=True):
            for number, c in enumerate(curves):
                colour, dashes = line_style(number)
                draw_line(panel, c.x, 100 * c.y, colour, dots=False, dashes=dashes)
                if c.end is not None:
                    end = (c.end[0], 100 * c.end[1])
                    panel.plot(*end, "D", color=colour, ms=6, mec="white", clip_on=False)
            panel.margins(x=0.03)
            panel.set_xlim(left=0)
            panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            panel.xaxis.set_major_formatter(FuncFormatter(_short))
            panel.set_xlabel(label)
        limits = _accuracy_limits([c for curves in drawn for c in curves])
        for i, panel in enumerate(axes):
            panel.set_ylim(*limits)
            panel.tick_params(labelleft=i == 0)
        put_title(axes[0], "Accuracy, %", [])
        return to_svg(figure, "Accuracy of every run over steps, samples decoded and seconds")


def _accuracy_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the limits of the upper half of the curves, where the runs differ."""
    seen = [100 * y for c in curves for y in (*c.y, *(c.end[1:] if c.end else ()))]
    ends = [100 * (c.end[1] if c.end else c.y[-1]) for c in curves if c.end or len(c.y)]
    bottom = (min(seen) + min(ends)) / 2
    margin = 0.06 * (max(seen) - bottom) or 1.0
    return bottom - margin, max(seen) + margin


def line_style(number: int) -> tuple[str, tuple[float, ...]]:
    """Return colour and dashes of the run with this number."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _short(value: float, _: int) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


KEY_CSS = """
.key span { margin-right: 22px; white-space: nowrap } .line { display: inline-block; width: 26px;
  height: 10px; margin-right: 7px; vertical-align: baseline }
"""


def line_key(number: int, label: str) -> Html:
    """Return the name of the curve with this number, after a piece of its line."""
    colour, dashes = line_style(number)
    dash = f" stroke-dasharray='{' '.join(f'{d:g}' for d in dashes)}'" if dashes else ""
    line = f"<line x1=0 y1=7 x2=26 y2=7 stroke='{colour}' stroke-width=3{dash} />"
    return Html(f"<svg class=line viewBox='0 0 26 10'>{line}</svg>{escape(label)}")
