"""Writes report.html of a grid: its jobs, best first, their curves, and who waited for what.

grid.json, timeline.jsonl, jobs/NAME/* --read_fleet--> FleetRecord --> page --> report.html
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from perfect.report import words
from perfect.report.fleet_record import STATES, FleetRecord, JobRecord, JobSpan, read_fleet
from perfect.report.page import Html, note, page, plot, section, table
from perfect.report.panels import (
    BLUE,
    COLOURS,
    DASHES,
    INK,
    KEY_CSS,
    MARGIN_RIGHT,
    MUTED,
    ORANGE,
    RULE,
    STYLE,
    WIDTH,
    draw_line,
    line_key,
    line_style,
    panels,
    put_legend,
    put_title,
    to_svg,
)
from perfect.report.words import DASH, count, duration, legible, percent

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
    curves = [curve for curve in curves if len(curve[2][0])]
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
    steps, step = [], int(stop["first"])
    while step <= end:
        steps.append(step)
        step *= int(stop["eta"])
    return steps


def timeline_figure(fleet: FleetRecord) -> str | None:
    """Draw a row for each device, and one for each job, over the seconds of the run."""
    end = fleet.seconds
    jobs = [job for job in fleet.jobs if job.spans][:MOST_ROWS]
    if not jobs or not end:
        return None
    on_device = [s for job in fleet.jobs for s in job.spans if s.phase in ON_DEVICE]
    rows = [
        (f"device {d}", [span for span in on_device if span.device == d], True)
        for d in fleet.devices
    ]
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


def _row(
    axes: Axes,
    low: int,
    label: str,
    shares: Mapping[str, NDArray[np.float64]],
    end: float,
    is_device: bool,
) -> None:
    edges = np.linspace(0, end, BINS + 1)
    bottom = np.full(BINS, low + 0.12)
    for phase, (_, colour) in PHASE_STYLES.items():
        if phase not in shares:
            continue
        top = bottom + 0.76 * shares[phase]
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
    """Return each phase's share of each of BINS equal stretches of the time up to `end`."""
    by_phase: dict[str, NDArray[np.float64]] = {}
    edges = np.linspace(0, end, BINS + 1)
    for span in spans:
        overlap = np.minimum(edges[1:], span.end) - np.maximum(edges[:-1], span.begin)
        share = np.clip(overlap, 0, None) * BINS / end
        by_phase[span.phase] = by_phase.get(span.phase, np.zeros(BINS)) + share
    return by_phase


CSS = """
td .line { vertical-align: middle } th.n { white-space: normal }
.job { white-space: nowrap } .job wbr { white-space: normal }
"""
"""A job's name is broken after a comma, and not at the hyphen of 1e-3."""


def write_fleet_page(folder: Path) -> Path:
    """Write report.html into the folder of a grid. Raise RunError if it holds none."""
    fleet = read_fleet(folder)
    path = folder / "report.html"
    path.write_text(fleet_page(fleet), encoding="utf-8")
    return path


def fleet_page(fleet: FleetRecord) -> str:
    """Return the page as HTML."""
    stops = fleet.fleet.get("stop")
    parts = [
        f"<style>{CSS}{KEY_CSS}</style>",
        _alerts(fleet),
        section(
            "Jobs, best first",
            _jobs(fleet),
            note(
                f"The best job has the {'lowest' if fleet.mode == 'min' else 'highest'}"
                f" {fleet.metric}, as it was last logged in training. Jobs without a number come"
                " last. A name leads to the page of that job."
            ),
        ),
        section(
            fleet.metric,
            plot(
                metric_figure(fleet),
                "A dot is the end of a job, a cross the end of one that was stopped early."
                + (" Dashed lines are the rungs at which jobs were judged." if stops else ""),
            )
            or note(f"No job has logged {fleet.metric}."),
        ),
        section(
            "What every device and every job did",
            plot(
                timeline_figure(fleet),
                "The height of a colour is its share of the time there. Devices show the jobs"
                " that had them to themselves."
                + (" The program began again at a dashed line." if fleet.restarts else ""),
            )
            or note("No job has begun."),
        ),
        section("Who waited for what", _waits(fleet)),
        section("Settings of the fleet", _settings(fleet)),
    ]
    return page(f"Grid {legible(fleet.folder.resolve().name)}", summary(fleet), parts)


def summary(fleet: FleetRecord) -> str:
    """Return what came of the grid in one sentence."""
    counts = {state: sum(job.state == state for job in fleet.jobs) for state in STATES}
    rest = len(fleet.jobs) - sum(counts.values())
    states = [f"{number} {state}" for state, number in counts.items() if number]
    states += [f"{rest} not at their end"] if rest else []
    jobs = f"{words.counted(len(fleet.jobs), 'job')} ({', '.join(states)})"
    took = f"{duration(fleet.seconds)} on {words.counted(len(fleet.devices), 'device')}"
    best = fleet.best
    if best is None:
        return f"{jobs} in {took}. No job has finished with a {fleet.metric}."
    judged = _describe_weights(best)
    more = f" ({', '.join(judged)})" if judged else ""
    return f'"{best.name}" is best: {fleet.metric} {best.metric:.5g}{more}. {jobs} in {took}.'


def _describe_weights(job: JobRecord) -> list[str]:
    """Say how good the final weights of a job are."""
    texts = []
    if job.run is not None:
        if (accuracy := job.run.number("accuracy")) is not None:
            texts.append(f"{job.run.record.get('accuracy_on')} accuracy {words.accuracy(accuracy)}")
        if (perplexity := job.run.number("perplexity")) is not None:
            texts.append(f"{job.run.record.get('perplexity_on')} perplexity {perplexity:.4g}")
    return texts


def _alerts(fleet: FleetRecord) -> str:
    alerts = [
        f"{job.name} failed after {words.counted(job.step, 'step')}:"
        f" {job.why or 'no reason is known'}"
        for job in fleet.jobs
        if job.state == "failed"
    ]
    if fleet.status == "interrupted":
        alerts.append("The grid was interrupted. The same command goes on with it.")
    if fleet.status == "out of time":
        alerts.append("Its time was over. The same command goes on with it for as long again.")
    text = "\n".join(alerts)
    return f"<p class=alert>{escape(text)}</p>" if text else ""


def _jobs(fleet: FleetRecord) -> str:
    accuracy, perplexity = (
        any(job.run is not None and job.run.number(key) is not None for job in fleet.jobs)
        for key in ("accuracy", "perplexity")
    )
    head = ["", "Job", *fleet.axes, fleet.metric]
    head += ["Accuracy"] * accuracy + ["Perplexity"] * perplexity
    head += ["Steps", "On device", "State"]
    rows = []
    for number, job in enumerate(fleet.jobs):
        cells: list[object] = [number + 1, _name(number, job)]
        for value in map(job.settings.get, fleet.axes):
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            cells.append(DASH if value is None else shown)
        cells.append(DASH if job.metric is None else f"{job.metric:.5g}")
        run = job.run
        if accuracy:
            cells.append(words.accuracy(run.number("accuracy")) if run else DASH)
        if perplexity:
            figure = run.number("perplexity") if run else None
            cells.append(DASH if figure is None else f"{figure:.4g}")
        why = f": {job.why}" if job.why and job.state in ("stopped", "failed") else ""
        cells += [count(job.step), words.seconds(job.seconds), f"{job.state}{why}"]
        rows.append(cells)
    return table(head, rows, words=(1, len(head) - 1))


def _name(number: int, job: JobRecord) -> Html:
    line, name = line_key(number, "") if number < MOST_LINE_STYLES else "", _breakable(job.name)
    if job.run is not None:
        name = f"<a href='{quote(job.folder)}/report.html'>{name}</a>"
    return Html(f"<span class=job>{line}{name}</span>")


def _breakable(name: str) -> str:
    return escape(name).replace(",", ",<wbr>")


def _waits(fleet: FleetRecord) -> str | None:
    """Return the seconds that each job spent in each phase."""
    jobs = [job for job in fleet.jobs if job.spans]
    seen = {span.phase for job in jobs for span in job.spans}
    phases = [phase for phase in PHASE_STYLES if phase in seen]
    if not jobs:
        return None

    def line(name: object, of: Sequence[JobRecord]) -> list[object]:
        spent = [
            sum(s.end - s.begin for job in of for s in job.spans if s.phase == phase)
            for phase in phases
        ]
        return [name, *(words.seconds(seconds) if seconds else DASH for seconds in spent)]

    works = sum(s.end - s.begin for job in jobs for s in job.spans if s.phase in ON_DEVICE)
    whole = fleet.seconds * len(fleet.devices)
    busy = percent(works / whole) if whole else DASH
    return table(
        ("", *(PHASE_STYLES[phase][0].capitalize() for phase in phases)),
        [
            *(line(Html(f"<span class=job>{_breakable(job.name)}</span>"), [job]) for job in jobs),
            line("All jobs", jobs),
        ],
    ) + note(f"Jobs had the devices for {busy} of the time.")


def _settings(fleet: FleetRecord) -> str:
    rows = []
    for key, value in fleet.fleet.items():
        if isinstance(value, dict):
            rows += [(f"{key}.{inner}", part) for inner, part in value.items() if part is not None]
        elif value is not None:
            rows.append((key, value))
    return table((), rows, words=(0, 1))
