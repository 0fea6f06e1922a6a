"""Draws the jobs of a grid together: the metric of all, and what each did when.

val_loss                            device 0  |####=####=#####################|
|\\__ ____                          lr=1e-3   |  ##   ##    ##   ##   ##   ## |
|   \\    \\___ o                    lr=3e-4   |    ##   ##- - - - ##   ##     |
+-------------- steps               the height of a bar is the share of that time
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from perfect.report.curves import COLOURS, DASHES, line_style
from perfect.report.fleet_record import FleetRecord, JobRecord, JobSpan
from perfect.report.panels import (
    BLUE,
    INK,
    MARGIN_RIGHT,
    MUTED,
    ORANGE,
    RULE,
    STYLE,
    WIDTH,
    draw_line,
    panels,
    put_legend,
    put_title,
    to_svg,
)
from perfect.report.words import duration

PHASE_STYLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "running": ("trains", BLUE),
        "starting": ("is built and planned", "#8d99a6"),
        "leaving": ("writes a checkpoint and leaves", "#009E73"),
        "ready": ("waits for its turn", "#dde9f2"),
        "at_rung": ("waits at a rung", ORANGE),
        "lobby": ("waits for memory", "#E69F00"),
        "waiting": ("waits to be started", "#f3eee2"),
    }
)
"""What a job does in each phase, and its colour, from the bottom of a row to its top."""
ON_DEVICE = ("running", "starting", "leaving")
"""In these phases a job has its device to itself."""
MOST_LINE_STYLES = len(COLOURS) * len(DASHES)
BINS = 160
MOST_ROWS = 60
TICK_STEPS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400)
"""Seconds that are round numbers of some unit."""
LABELS, ROW, TOP, BOTTOM = 2.35, 0.24, 0.36, 0.44
"""These widths and heights are in inches."""


def metric_figure(fleet: FleetRecord) -> str | None:
    """Draw the metric of every job over steps, and over the seconds of its own turns. A dot is the
    end of a job, a cross that of one that was stopped."""
    curves = [
        (number, job, job.run.metrics.pairs("step", fleet.metric),
         job.run.metrics.pairs("wall_seconds", fleet.metric))
        for number, job in enumerate(fleet.jobs)
        if job.run is not None
    ]  # fmt: skip
    curves = [one for one in curves if len(one[2][0])]
    if not curves:
        return None
    with panels([3.0], columns=2) as (figure, axes):
        # The best job comes last, and lies above the others.
        for number, job, steps, seconds in reversed(curves):
            colour, dashes = line_style(number) if number < MOST_LINE_STYLES else (RULE, ())
            for panel, (x, y) in zip(axes, (steps, seconds), strict=True):
                draw_line(panel, x, y, colour, dots=False, dashes=dashes)
                mark = "X" if job.state == "stopped" else "o"
                panel.plot(x[-1], y[-1], mark, color=colour, ms=5.5, mec="white", clip_on=False)
        values = np.concatenate([y for _, _, (_, y), _ in curves])
        for panel, label in zip(axes, ("optimizer step", "seconds of its own turns"), strict=True):
            if values.min() > 0 and values.max() > 5 * values.min():
                panel.set_yscale("log")
                panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
                panel.yaxis.set_minor_formatter(NullFormatter())
            panel.margins(x=0.03)
            panel.set_xlim(left=0)
            panel.set_xlabel(label)
        axes[1].tick_params(labelleft=False, which="both")
        axes[1].set_ylim(axes[0].get_ylim())
        longest = max(float(steps[0][-1]) for _, _, steps, _ in curves)
        for rung in rungs(fleet.fleet, longest):
            axes[0].axvline(rung, color=RULE, linewidth=0.9, dashes=(3, 2), zorder=0)
        put_title(axes[0], fleet.metric, [])
        return to_svg(figure, f"{fleet.metric} of every job over steps and over seconds")


def rungs(fleet: Mapping[str, object], end: float) -> list[int]:
    """Return the steps at which a stop rule looked, up to `end`."""
    stop = fleet.get("stop")
    if not isinstance(stop, Mapping):
        return []
    found, step = [], int(stop["first"])
    while step <= end:
        found.append(step)
        step *= int(stop["eta"])
    return found


def timeline_figure(fleet: FleetRecord) -> str | None:
    """Draw a row for each device, and one for each job, over the seconds of the run."""
    end = fleet.seconds
    jobs = [job for job in fleet.jobs if job.spans][:MOST_ROWS]
    if not jobs or not end:
        return None
    rows = [(f"device {d}", _spans_on_device(fleet.jobs, d), True) for d in fleet.devices]
    rows += [(job.name, job.spans, False) for job in jobs]
    height = TOP + ROW * len(rows) + BOTTOM
    width = WIDTH - LABELS - MARGIN_RIGHT
    with matplotlib.rc_context(dict(STYLE)):
        figure = Figure(figsize=(WIDTH, height))
        box = (LABELS / WIDTH, BOTTOM / height, width / WIDTH, ROW * len(rows) / height)
        axes = figure.add_axes(box)
        for number, (label, spans, is_device) in enumerate(rows):
            _row(axes, len(rows) - 1 - number, label, shares(spans, end), end, is_device)
        axes.set_xlim(0, end)
        axes.set_ylim(0, len(rows))
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        every = next((s for s in TICK_STEPS if end <= 8 * s), end / 8)
        axes.set_xticks(np.arange(0, 0.97 * end, every))  # no label beyond the figure's edge
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: duration(x)))
        for second in fleet.restarts:
            axes.axvline(second, color=INK, linewidth=0.9, dashes=(3, 2))
        seen = {span.phase for _, spans, _ in rows for span in spans}
        entries = [entry for phase, entry in PHASE_STYLES.items() if phase in seen]
        put_legend(figure, entries, height, gap=1.4)
        return to_svg(figure, "What every device and every job did, over the seconds of the run")


def _spans_on_device(jobs: Sequence[JobRecord], device: int) -> list[JobSpan]:
    """Return what jobs did that had this device to themselves."""
    return [
        span
        for job in jobs
        for span in job.spans
        if span.device == device and span.phase in ON_DEVICE
    ]


def _row(
    axes: Axes,
    low: int,
    label: str,
    found: Mapping[str, NDArray[np.float64]],
    end: float,
    is_device: bool,
) -> None:
    edges = np.linspace(0, end, BINS + 1)
    bottom = np.full(BINS, low + 0.12)
    for phase, (_, colour) in PHASE_STYLES.items():
        if phase not in found:
            continue
        top = bottom + 0.76 * found[phase]
        axes.fill_between(
            np.repeat(edges, 2)[1:-1], np.repeat(bottom, 2), np.repeat(top, 2), color=colour,
            linewidth=0,
        )  # fmt: skip
        bottom = top
    text = label if len(label) <= 38 else f"{label[:37]}\N{HORIZONTAL ELLIPSIS}"
    axes.annotate(
        text, (0, low + 0.5), xytext=(-8, 0), textcoords="offset points", ha="right", va="center",
        fontsize=8.5, fontweight="bold" if is_device else "normal",
        color=INK if is_device else MUTED, parse_math=False, annotation_clip=False,
    )  # fmt: skip


def shares(spans: Sequence[JobSpan], end: float) -> dict[str, NDArray[np.float64]]:
    """Return for each phase its share of each of BINS equal stretches of the time up to `end`. So
    thousands of turns are drawn by a few points."""
    found: dict[str, NDArray[np.float64]] = {}
    edges = np.linspace(0, end, BINS + 1)
    for span in spans:
        overlap = np.minimum(edges[1:], span.end) - np.maximum(edges[:-1], span.begin)
        share = np.clip(overlap, 0, None) * BINS / end
        found[span.phase] = found.get(span.phase, np.zeros(BINS)) + share
    return found
