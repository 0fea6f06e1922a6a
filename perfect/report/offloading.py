"""The sections of a run with `offload:`: where its time went, its memory, its predictions.

run.json, offload --> stalls_section     one bar per phase: kernels | transfers | input | ...
                  --> memory_section     budget, peak, and the pictures that the run has drawn
                  --> steps_section      one row per plan: predicted against measured
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import inf
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfect.report import words
from perfect.report.page import note, plot, section, table
from perfect.report.panels import BLUE, INK, MUTED, ORANGE, STYLE, WIDTH, put_legend, to_svg
from perfect.report.results import Run
from perfect.report.words import DASH, brief, count, duration, percent, seconds, size, times

PARTS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "compute_seconds": ("kernels", BLUE, "white"),
        "transfer_seconds": ("waiting for transfers", ORANGE, "white"),
        "input_seconds": ("waiting for input", "#E69F00", INK),
        "planning_seconds": ("capturing and planning", "#8d99a6", "white"),
        "rest": ("everything else", "#dde2e7", INK),
    }
)
"""For each part its name, its colour and the colour of text in it, in the order of the bar."""
TOP, BAR, ROW = 0.34, 0.24, 0.52
"""These heights are in inches."""


@dataclass(frozen=True, slots=True)
class TimeShares:
    """The training time of a phase, or of a whole run."""

    name: str
    seconds: float
    parts: Mapping[str, float]

    @classmethod
    def from_row(
        cls, row: Mapping[str, Any], name: str = ""
    ) -> "TimeShares":  # Any: a row of run.json
        """Read a row. The rest is the time that no other part contains."""
        parts = {key: float(row.get(key) or 0.0) for key in PARTS if key != "rest"}
        seconds = max(float(row.get("seconds") or 0.0), sum(parts.values()))
        parts["rest"] = seconds - sum(parts.values())
        return cls(name or str(row["name"]), seconds, parts)

    def share(self, part: str) -> float | None:
        return self.parts[part] / self.seconds if self.seconds else None


def time_bars(times: Sequence[TimeShares]) -> str | None:
    """Draw a figure that is as wide as the text, unlike figures with axes."""
    times = [time for time in times if time.seconds]
    if not times:
        return None
    height = TOP + ROW * len(times)
    with matplotlib.rc_context(dict(STYLE)):
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((0, 0, 1, ROW * len(times) / height))
        for number, time in enumerate(times):
            _bar(axes, len(times) - 1 - number, time)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, len(times))
        axes.set_axis_off()
        entries = [(name, colour) for name, colour, _ in PARTS.values()]
        put_legend(figure, entries, height, gap=1.8)
        return to_svg(figure, "Where the time of training went")


def _bar(axes: Axes, low: float, time: TimeShares) -> None:
    height = BAR / ROW
    left = 0.0
    for part, (_, colour, ink) in PARTS.items():
        share = time.share(part) or 0.0
        axes.barh(low, share, height, left, align="edge", color=colour, linewidth=0)
        if share >= 0.055:
            axes.annotate(
                percent(share), (left + share / 2, low + height / 2), ha="center", va="center",
                color=ink, fontsize=8.5,
            )  # fmt: skip
        left += share
    at = low + height
    axes.annotate(
        time.name, (0, at), xytext=(0, 3), textcoords="offset points", va="bottom",
        fontweight="bold", parse_math=False,
    )  # fmt: skip
    axes.annotate(
        duration(time.seconds), (1, at), xytext=(0, 3), textcoords="offset points", va="bottom",
        ha="right", color=MUTED,
    )  # fmt: skip


Row = Mapping[str, Any]  # Any: rows of run.json
TRUSTED = 0.1
"""A prediction that is wrong by a larger share gets a remark."""


def stalls_section(run: Run) -> str:
    stats = run.table("offload")
    if not stats:
        return ""
    spent = [TimeShares.from_row(row) for row in stats.get("phases") or ()]
    if len(spent) > 1:
        spent.insert(0, TimeShares.from_row(stats, "whole run"))
    if not stats.get("runs"):
        trained = any(time.seconds for time in spent)
        reason = (
            "No step was planned: the run trained eagerly." if trained else "No step was trained."
        )
        return section("Where the time goes", note(reason))
    head = ("", "Training", *(name.capitalize() for name, *_ in PARTS.values()))
    rows = [
        (time.name, seconds(time.seconds), *(percent(time.share(part)) for part in PARTS))
        for time in spent
    ]
    return section(
        "Where the time goes",
        plot(time_bars(spent)),
        table(head, rows),
        note(
            "Shares are of the time in which the run trained, without validation. The run waits for"
            " transfers when every kernel that is left needs a copy first. Everything else is"
            " loggers, checkpoints, steps that ran eagerly (such as those that check the first"
            " ones), and the gaps between kernels."
        ),
    )


def memory_section(run: Run) -> str:
    stats = run.table("offload")
    if not stats.get("peak_bytes"):
        return ""
    unmoved = stats.get("unmoved_bytes")
    figures = {
        "Budget": stats.get("budget_bytes"),
        "Taken by the plan": stats["peak_bytes"],
        "In use at the same time, measured": stats.get("held_bytes"),
        "The smallest budget that can be planned": stats.get("smallest_bytes"),
        "Needed if nothing is moved": unmoved,
        "On the host": stats.get("host_bytes"),
    }
    rows = [
        (name, size(nbytes), percent(_divide(nbytes, unmoved)))
        for name, nbytes in figures.items()
        if nbytes is not None
    ]
    return section(
        "Memory over the step",
        table(("", "Bytes", "Share of what a step needs"), rows),
        *(_picture(run, row) for row in stats.get("plans") or ()),
    )


def _picture(run: Run, row: Row) -> str | None:
    """Return the picture that the run has drawn, as a figure of the page. It is an image, in which
    a browser runs no script, as anybody may have put the file into the folder."""
    path = run.folder / str(row.get("picture"))
    if path.parent != run.folder or not path.is_file():
        return None
    svg = path.read_bytes()
    if b"<svg" not in svg:
        return note(f"{path.name} is damaged and cannot be shown.")
    name = f"{row['part']}, batch of {row['inputs']}"
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    image = f'<img alt="{escape(f"Memory: {name}")}" src="{source}">'
    return plot(image, f"{name[0].upper()}{name[1:]}: the plan as it was simulated.", broad=True)


def steps_section(run: Run) -> str:
    stats = run.table("offload")
    plans = stats.get("plans") or ()
    if not plans:
        return ""
    head = ("Batch", "Part", "Runs", "Predicted", "Measured", "Ratio", "Transfer stall",
            "Copied in", "Copied out", "Bound by")  # fmt: skip
    rows = [
        (
            row["inputs"],
            row["part"],
            count(row["runs"]),
            brief(row.get("predicted_seconds")),
            brief(row.get("median_seconds")),
            times(_ratio(row)),
            percent(_divide(row.get("transfer_seconds"), row.get("seconds"))),
            size(row.get("bytes_in")),
            size(row.get("bytes_out")),
            row.get("binds") or DASH,
        )
        for row in plans
    ]
    ran, made, kept = "", stats.get("plans_made") or len(plans), len(plans)
    if device := stats.get("device"):  # run.json of older versions does not contain it
        ran = f" Steps ran on {escape(str(device))}, engine {escape(str(stats.get('engine')))}."
    more = f" {count(made)} plans were made; those that are not listed are no longer kept."
    return section(
        "Step time, predicted and measured",
        f"<p>{prediction(stats)}{ran}</p>",
        table(head, rows, words=(0, 1, 9)),
        note("Measured is the median of the latest runs." + (more if made > kept else "")),
    )


def prediction(stats: Row) -> str:
    """Compare predicted and measured time in one sentence."""
    ratio = _ratio(stats)
    if ratio is None:
        return "No step was measured."
    line = (
        f"A step was predicted to take {brief(stats['predicted_seconds'])} and took"
        f" {brief(stats['median_seconds'])}: {times(ratio)}."
    )
    if abs(ratio - 1) <= TRUSTED:
        return line
    off = percent(abs(ratio - 1), 0)
    if ratio < 1:
        return f"{line} That is {off} less: the machine was busier when its kernels were measured."
    return (
        f"{line} That is {off} more: the machine was busier than when its kernels were measured,"
        " or the gaps between kernels are long. The budget is kept in either case."
    )


def _ratio(row: Row) -> float | None:
    return _divide(row.get("median_seconds"), row.get("predicted_seconds"))


def _divide(part: float | None, whole: float | None) -> float | None:
    """Return None where nobody has counted."""
    return part / whole if part is not None and whole else None


MOST_ROWS = 40
"""A long run may have a thousand generations; the first and the last ones are listed."""
MEANINGS = (
    "Samples/s: while the peer computed lanes, and waited for their samples. Utilisation: the share"
    " of the time in the swarm in which it did so. Sent: the bytes of sums that it gave to other"
    " members in reduces, without the last one."
)


def swarm_section(run: Run) -> str:
    swarm = run.table("elastic")
    generations: Sequence[Row] = swarm.get("generations") or ()
    if not swarm:
        return ""
    if not generations:
        return section("The swarm", note("This peer was not a member of any generation."))
    return section(
        "The swarm",
        f"<p>{escape(_lead(swarm, generations))}</p>",
        _shares(swarm.get("peers") or ()),
        _generations(generations),
        _gaps(swarm.get("gaps") or (), run.rows("phases")),
    )


def _lead(swarm: Row, generations: Sequence[Row]) -> str:
    began = swarm.get("began") or {}
    how = {
        "nothing": "with the first weights",
        "checkpoint": f"with a checkpoint of step {began.get('step')}",
        "member": f"with a member's state of step {began.get('step')}",
    }.get(str(began.get("with")), "")
    most = max(len(row["members"]) for row in generations)
    return (
        f"A step was dealt in {swarm.get('lanes')} lanes to {most} or fewer peers. This peer began"
        f" {how}, and saw {words.counted(len(generations), 'generation')}."
    )


def _shares(peers: Sequence[Row]) -> str:
    lanes = sum(peer["lanes"] for peer in peers)
    if not lanes:
        return note("No step was committed.")
    rows = [
        (
            peer["name"],
            count(peer["lanes"]),
            percent(peer["lanes"] / lanes),
            count(peer["steps"]),
            count(_divide(peer.get("samples"), peer.get("seconds"))),
            percent(_divide(peer.get("seconds"), peer.get("present"))),
            size(peer.get("bytes_sent")),
        )
        for peer in peers
    ]
    bars = "".join(
        f"<div class=bar title='{escape(str(peer['name']), quote=True)}'>"
        f"<i style='width:{100 * peer['lanes'] / lanes:.2f}%'></i></div>"
        for peer in peers
    )
    head = ("Peer", "Lanes computed", "Share", "Steps", "Samples/s", "Utilisation", "Sent")
    return bars + table(head, rows, words=(0,)) + note(MEANINGS)


def _generations(generations: Sequence[Row]) -> str:
    listed = list(generations)
    left = len(listed) - MOST_ROWS
    if left > 0:
        listed = [*listed[: MOST_ROWS // 2], *listed[-MOST_ROWS // 2 :]]
    rows = [
        (
            count(row["generation"]),
            words.seconds(row["seconds"]),
            count(row["step"]),
            count(row["steps"]),
            ", ".join(row["members"]),
            row.get("ended") or DASH,
        )
        for row in listed
    ]
    head = ("Generation", "Began after", "At step", "Steps", "Members", "Ended because")
    more = note(f"{count(left)} generations in the middle are not listed.") if left > 0 else ""
    return table(head, rows, words=(4, 5)) + more


def _gaps(gaps: Sequence[Row], phases: Sequence[Row]) -> str:
    if not gaps:
        return note("No generation ended unplanned, so there were no gaps.")
    median, longest, whole = _summarize_waits(gaps)
    lead = note(
        f"{words.counted(len(gaps), 'generation')} ended unplanned. Until the"
        f" next one had begun this peer waited {median} (median), {longest} at most, {whole} in"
        " all. No step was lost."
    )
    if len(phases) < 2:
        return lead
    ends = [phase["first_step"] for phase in phases[1:]]
    rows = []
    for phase, first, end in zip(phases, [0, *ends], [*ends, inf], strict=True):
        here = [gap for gap in gaps if first <= gap["step"] < end]
        waits = _summarize_waits(here) if here else [DASH] * 3
        rows.append((phase["name"], count(len(here)), *waits))
    head = ("Phase", "Gaps", "Median", "Longest", "In all")
    return lead + table(head, rows, words=(0,))


def _summarize_waits(gaps: Sequence[Row]) -> list[str]:
    """Return the median, the longest and all seconds of gaps."""
    seconds = sorted(gap["seconds"] for gap in gaps)
    return [brief(value) for value in (seconds[len(seconds) // 2], seconds[-1], sum(seconds))]
