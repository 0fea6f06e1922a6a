"""Figures of a run, as SVG text to stand in a page: numbers in, text out, nothing kept.

    metrics.csv -> Metrics (columns) -> learning_curves   accuracy | loss      over steps
                                        learning_rate                          over steps
                                        input_pipeline    served, decoded | stall  over seconds
    trace of the plateau rule        -> plateau_trace     slopes against their thresholds

Phases are shaded (the more reuse, the darker) and a switch is a dashed line, in every figure of a
run. Figures are made through `Figure`, never pyplot, and styled inside one `rc_context`, so nothing
outside sees them. A figure that would be empty is None. Colours: Okabe and Ito, told apart by
everybody; training is orange and hold-out blue. perfect/compare.py draws with the last part, too.
"""

import csv
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

Column = NDArray[np.float64]

BLUE, ORANGE, GREEN, INK, MUTED, RULE = (
    "#0072B2", "#D55E00", "#009E73", "#1f2933", "#66717e", "#c9d0d8",
)  # fmt: skip
TIMES = "\N{MULTIPLICATION SIGN}"
WIDTH = 9.4
MARGIN_LEFT, MARGIN_RIGHT = 0.52, 0.12  # inches: the same in all figures, so that they line up
STYLE: Mapping[Any, Any] = MappingProxyType(  # Any: matplotlib's settings have every type
    {
        "svg.fonttype": "none", "svg.hashsalt": "perfect", "font.family": "sans-serif",
        "font.size": 9.0, "text.color": INK, "text.usetex": False, "axes.edgecolor": RULE,
        "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
        "axes.labelcolor": MUTED, "axes.labelsize": 9.0, "axes.grid": True, "axes.grid.axis": "y",
        "axes.axisbelow": True, "grid.color": "#e4e8ec", "grid.linewidth": 0.7,
        "xtick.color": RULE, "ytick.color": RULE, "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED, "ytick.major.size": 0.0, "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round", "figure.facecolor": "none", "axes.facecolor": "none",
        "savefig.facecolor": "none", "axes.xmargin": 0.0,
    }
)  # fmt: skip


# ---- the numbers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metrics:
    """Columns of metrics.csv. An empty cell is NaN; one that says nan or inf is inf: the row had
    a value, which no figure can show."""

    columns: Mapping[str, Column]

    def pairs(self, x: str, y: str) -> tuple[Column, Column]:
        """The rows that have a number in both columns; none if a column is missing."""
        if x not in self.columns or y not in self.columns:
            return np.empty(0), np.empty(0)
        known = np.isfinite(self.columns[x]) & np.isfinite(self.columns[y])
        return self.columns[x][known], self.columns[y][known]

    def first_not_finite(self, name: str) -> int | None:
        """The first step whose value is not a finite number."""
        if name not in self.columns or not np.isinf(self.columns[name]).any():
            return None
        return int(self.columns["step"][np.isinf(self.columns[name]).argmax()])


def read_metrics(path: Path) -> Metrics:
    """Reads metrics.csv. A row cut short (the run was killed while writing it) is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        head = next(rows, ["step"])
        if "step" not in head:
            raise ValueError("the first row names no column 'step'")
        body = [
            [_cell(text, rows.line_num, name) for text, name in zip(row, head, strict=True)]
            for row in rows
            if len(row) == len(head)
        ]
    table = np.array(body, dtype=float).reshape(-1, len(head))
    return Metrics({name: table[:, i] for i, name in enumerate(head)})


def _cell(text: str, line: int, name: str) -> float:
    if not text.strip():
        return math.nan
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"line {line}: {name}: {text[:40]!r} is not a number") from None
    return value if math.isfinite(value) else math.inf


@dataclass(frozen=True, slots=True)
class Rates:
    """What the loader did between rows: element i holds from seconds[i] to seconds[i + 1]."""

    seconds: Column
    decoded: Column
    """Samples a second."""
    served: Column
    stalled: Column
    """Fraction of the time."""


def rates(metrics: Metrics, intervals: int = 60) -> Rates | None:
    """Rates between rows, in at most `intervals` intervals. NaN where a clock or a counter went
    back, as it may where a run was resumed."""
    names = ("wall_seconds", "decoded", "served", "stall_seconds")
    if any(name not in metrics.columns for name in names):
        return None
    table = np.stack([metrics.columns[name] for name in names])
    table = table[:, np.isfinite(table).all(axis=0)]
    if table.shape[1] < 2:
        return None
    table = table[:, np.unique(np.linspace(0, table.shape[1] - 1, intervals + 1).astype(int))]
    # Rows of one moment (training and validation of one step) make no interval.
    table = table[:, np.concatenate([[True], np.diff(table[0]) != 0])]
    change = np.diff(table, axis=1)
    change[:, (change[0] < 0) | (change[1:] < 0).any(axis=0)] = np.nan
    seconds, decoded, served, stalled = change
    if not np.isfinite(seconds).any():
        return None
    return Rates(table[0], decoded / seconds, served / seconds, stalled / seconds)


# ---- what a run's figures share -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
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
class Story:
    """What is drawn behind every curve of a run."""

    spans: Sequence[Span] = ()
    marks: Sequence[Mark] = ()

    @classmethod
    def of(
        cls,
        phases: Sequence[Mapping[str, Any]],  # Any: rows of run.json
        switches: Sequence[Mapping[str, Any]],
    ) -> "Story":
        starts = [p["first_step"] for p in phases]
        ends = [*starts[1:], *(p["last_step"] + 1 for p in phases[-1:])]
        spans = [
            Span(str(phase["name"]), phase["reuse"], start, end)
            for phase, start, end in zip(phases, starts, ends, strict=True)
        ]
        # The last phase's end enters no other: it is the run's end, and no switch.
        entered = [s for s in switches if s.get("entered") is not None]
        return cls(spans, [Mark(s["step"], f"switch: {s['reason']}") for s in entered])

    def over_seconds(self, metrics: Metrics) -> "Story":
        """The same on an axis of seconds."""
        steps, seconds = metrics.pairs("step", "wall_seconds")

        def when(step: float) -> float:
            return float(np.interp(step, steps, seconds))

        spans = [Span(s.name, s.reuse, when(s.start), when(s.end)) for s in self.spans]
        return Story(spans, [Mark(when(m.step), m.text) for m in self.marks])

    def draw(self, below: Sequence[Axes], end: float, mark_text: bool = False) -> None:
        """Shades panels up to `end`; labels phases above the first, marks inside it."""
        start, stop = 0.0, end if end > 0 else 1.0
        for axes in below:
            axes.set_xlim(start, stop)
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
            _say(below[0], span.start / stop, 1.0, label, (3, 4), color=MUTED, va="bottom")
        for i, mark in enumerate(self.marks if mark_text else ()):
            right = mark.step < 0.6 * stop
            offset = (5 if right else -5, 5 + 12 * (i % 4))
            side = "left" if right else "right"
            _say(below[0], mark.step / stop, 0.0, mark.text, offset, ha=side, va="bottom")


def _reuse(times: int) -> str:
    return "fresh" if times == 1 else f"reuse {times}"


def _say(
    axes: Axes, x: float, y: float, text: str, offset: tuple[float, float], **how: Any
) -> None:
    """Text at a place in fractions of the axes. Users' names are no mathematics: a $ is a $."""
    axes.annotate(
        text, (x, y), xytext=offset, xycoords="axes fraction", textcoords="offset points",
        parse_math=False, annotation_clip=False, **how,
    )  # fmt: skip


# ---- the figures of a run -----------------------------------------------------------------------


def learning_curves(
    metrics: Metrics, story: Story, steps: float, test_accuracy: float | None = None
) -> str | None:
    """Accuracy above, loss below; `test_accuracy` (0 to 1) is a diamond at the last step."""
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
            put_title(axes[0], "Accuracy, %", keys, above_labels=True)
        if has_loss:
            _loss(axes[-1], metrics, loss, held_out, above_labels=not has_accuracy)
        story.draw(axes, steps, mark_text=True)
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


def learning_rate(metrics: Metrics, story: Story, steps: float) -> str | None:
    x, y = metrics.pairs("step", "lr")
    if not len(x):
        return None
    with panels([1.35]) as (figure, (axes,)):
        draw_line(axes, x, y, GREEN, dots=False)
        axes.set_ylim(0, max(y.max() * 1.08, 1e-12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        story.draw([axes], steps)
        axes.set_xlabel("optimizer step")
        return to_svg(figure, "Learning rate over optimizer steps")


def input_pipeline(metrics: Metrics, story: Story) -> str | None:
    """Samples decoded and served a second, and the share of time spent waiting for a decode."""
    seen = rates(metrics)
    if seen is None:
        return None
    with panels([1.7, 1.1], gap=0.34, top=0.5) as (figure, axes):
        where = np.repeat(seen.seconds, 2)[1:-1]
        # Where nothing is reused the two are one: the thin line then lies in the thick one.
        for values, colour, wide in ((seen.served, BLUE, 2.4), (seen.decoded, ORANGE, 1.1)):
            axes[0].plot(where, np.repeat(values, 2), color=colour, linewidth=wide)
        axes[0].set_ylim(bottom=0)
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        stalled = np.repeat(100 * seen.stalled, 2)
        axes[1].fill_between(where, stalled, color=INK, alpha=0.18, linewidth=0)
        axes[1].plot(where, stalled, color=INK, linewidth=1.1)
        axes[1].set_ylim(0, 100)
        keys = [("served", BLUE), ("decoded", ORANGE)]
        put_title(axes[0], "Samples a second", keys, above_labels=True)
        put_title(axes[1], "Waiting for decoding, % of the time", [])
        story.over_seconds(metrics).draw(axes, float(seen.seconds.max()))
        axes[1].set_xlabel("seconds since the run began")
        return to_svg(figure, "Samples decoded and served a second, and stall share, over seconds")


@dataclass(frozen=True, slots=True)
class Slopes:
    """One check of the plateau rule."""

    at: float
    """Epoch-equivalents."""
    accuracy: float | None
    """Points an epoch."""
    loss: float | None
    """Relative change an epoch."""
    fired: bool


def plateau_trace(
    checks: Sequence[Slopes], accuracy_below: float | None, loss_below: float | None
) -> str | None:
    """Slopes over epochs; the bands are where the rule calls a curve flat."""
    accuracy = [(c.at, c.accuracy, c.fired) for c in checks if c.accuracy is not None]
    loss = [(c.at, 100 * c.loss, c.fired) for c in checks if c.loss is not None]
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
    # Early slopes are a hundred times the threshold: linear up to it, logarithmic beyond.
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


# ---- drawing ------------------------------------------------------------------------------------


@contextmanager
def panels(
    heights: Sequence[float], gap: float = 0.0, top: float = 0.3, columns: int = 1
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of panels below one another (or `columns` abreast), in inches, in our style."""
    bottom, between = 0.42, 0.22
    height = sum(heights) + gap * (len(heights) - 1) + top + bottom
    width = (WIDTH - MARGIN_LEFT - MARGIN_RIGHT - between * (columns - 1)) / columns
    with matplotlib.rc_context(dict(STYLE)), warnings.catch_warnings():
        # The reader's browser has the glyph, or shows its own box: no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(WIDTH, height))
        axes, y = [], height - top
        for tall in heights:
            y -= tall
            for column in range(columns):
                x = MARGIN_LEFT + column * (width + between)
                box = (x / WIDTH, y / height, width / WIDTH, tall / height)
                axes.append(figure.add_axes(box))
            y -= gap
        for panel in axes[: -columns or None]:
            panel.tick_params(labelbottom=False)
        yield figure, axes


def draw_line(
    axes: Axes,
    x: Column,
    y: Column,
    colour: str,
    dots: bool = True,
    dashes: tuple[float, ...] = (),
) -> None:
    line = axes.plot(x, y, color=colour)[0]
    if dashes:
        line.set_dashes(dashes)
    if len(x) == 1 or (dots and len(x) <= 60):
        line.set_marker("o")
        line.set_markersize(3.2)


def put_title(
    axes: Axes, text: str, keys: Sequence[tuple[str, str]], above_labels: bool = False
) -> None:
    """Title and key in one line above the panel, each word in its curve's colour."""
    lift = 19.0 if above_labels else 6.0
    _say(axes, 0.0, 1.0, text, (0, lift), fontweight="bold", va="bottom")
    # Right-aligned, last key first: widths in a reader's font are not known here.
    right = 0.0
    for name, colour in reversed(keys):
        swatch = "" if name.startswith(("◆", "not")) else "— "
        _say(axes, 1.0, 1.0, swatch + name, (-right, lift), color=colour, ha="right", va="bottom")
        right += 5.1 * len(swatch + name) + 10


def to_svg(figure: Figure, title: str) -> str:
    """The figure as an <svg> element: as wide as its container, no prologue, no names that another
    figure on the page has too, nothing that points outside."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style type=\"text/css\">.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    box = re.search(r'viewBox="[^"]*"', text)
    head = f'<svg role="img" aria-label="{escape(title)}" {box.group() if box else ""}>'
    return head + text[text.index(">") + 1 :].strip()
