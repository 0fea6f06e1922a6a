"""The sections of a run with `offload:`: where its time went, its memory, its predictions.

    run.json, offload --> stalls_section     one bar per phase: kernels | transfers | input | ...
                      --> memory_section     budget, peak, and the pictures that the run has drawn
                      --> steps_section      one row per plan: predicted against measured

A run without `offload:` has none of the three. The pictures are files beside run.json; a missing
one is left out.
"""

import base64
from collections.abc import Mapping
from html import escape
from typing import Any

from perfect.report.page import note, plot, section, table
from perfect.report.results import Run
from perfect.report.time_bars import PARTS, TimeShares, time_bars
from perfect.report.words import DASH, brief, count, percent, seconds, size, times

Row = Mapping[str, Any]  # Any: rows of run.json
TRUSTED = 0.1
"""A prediction that is wrong by a larger share gets a remark."""


def stalls_section(run: Run) -> str:
    found = run.table("offload")
    if not found:
        return ""
    spent = [TimeShares.from_row(row) for row in found.get("phases") or ()]
    if len(spent) > 1:
        spent.insert(0, TimeShares.from_row(found, "whole run"))
    if not found.get("runs"):
        trained = any(time.seconds for time in spent)
        told = (
            "No step was planned: the run trained eagerly." if trained else "No step was trained."
        )
        return section("Where the time goes", note(told))
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
    found = run.table("offload")
    if not found.get("peak_bytes"):
        return ""
    unmoved, peak = found.get("unmoved_bytes"), found["peak_bytes"]
    rows = [
        ("Budget", size(found.get("budget_bytes")), _share(found.get("budget_bytes"), unmoved)),
        ("Taken by the plan", size(peak), _share(peak, unmoved)),
        ("In use at the same time, measured", size(found.get("held_bytes")),
         _share(found.get("held_bytes"), unmoved)),
        ("The smallest budget that can be planned", size(found.get("smallest_bytes")),
         _share(found.get("smallest_bytes"), unmoved)),
        ("Needed if nothing is moved", size(unmoved), _share(unmoved, unmoved)),
        ("On the host", size(found.get("host_bytes")), _share(found.get("host_bytes"), unmoved)),
    ]  # fmt: skip
    return section(
        "Memory over the step",
        table(("", "Bytes", "Share of what a step needs"), [row for row in rows if row[1] != DASH]),
        *(_picture(run, row) for row in found.get("plans") or ()),
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
    told = f"{row['part']}, batch of {row['inputs']}"
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    image = f'<img alt="{escape(f"Memory: {told}")}" src="{source}">'
    return plot(image, f"{told[0].upper()}{told[1:]}: the plan as it was simulated.", broad=True)


def steps_section(run: Run) -> str:
    found = run.table("offload")
    plans = found.get("plans") or ()
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
    made, kept = found.get("plans_made") or len(plans), len(plans)
    more = f" {count(made)} plans were made; those that are not listed are no longer kept."
    return section(
        "Step time, predicted and measured",
        f"<p>{prediction(found)}{_where_it_ran(found)}</p>",
        table(head, rows, words=(0, 1, 9)),
        note("Measured is the median of the latest runs." + (more if made > kept else "")),
    )


def prediction(found: Row) -> str:
    """Compare predicted and measured time in one sentence."""
    ratio = _ratio(found)
    if ratio is None:
        return "No step was measured."
    said = (
        f"A step was predicted to take {brief(found['predicted_seconds'])} and took"
        f" {brief(found['median_seconds'])}: {times(ratio)}."
    )
    if abs(ratio - 1) <= TRUSTED:
        return said
    off = percent(abs(ratio - 1), 0)
    if ratio < 1:
        return f"{said} That is {off} less: the machine was busier when its kernels were measured."
    return (
        f"{said} That is {off} more: the machine was busier than when its kernels were measured, or"
        " the gaps between kernels are long. The budget is kept in either case."
    )


def _where_it_ran(found: Row) -> str:
    """Say where the steps ran. run.json of older versions does not contain it."""
    device, engine = found.get("device"), found.get("engine")
    return f" Steps ran on {escape(str(device))}, engine {escape(str(engine))}." if device else ""


def _ratio(row: Row) -> float | None:
    return _divide(row.get("median_seconds"), row.get("predicted_seconds"))


def _divide(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _share(part: float | None, whole: float | None) -> str:
    return percent(_divide(part, whole))
