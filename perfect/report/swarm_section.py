"""The section of a run that several nodes have trained: generations, gaps, who computed how much.

run.json, elastic --> peers: a bar for each | gaps: how many, how long | generations: a table

Everything is told as one peer has seen it, from the step at which it came in.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from perfect.report.page import note, section, table
from perfect.report.results import Run
from perfect.report.words import DASH, brief, count, duration, percent

Row = Mapping[str, Any]  # Any: rows of run.json
MOST_ROWS = 40
"""A long run may have a thousand generations; the first and the last ones are listed."""


def swarm_section(run: Run) -> str:
    found = run.table("elastic")
    generations: Sequence[Row] = found.get("generations") or ()
    if not found:
        return ""
    if not generations:
        return section("The swarm", note("This peer was not a member of any generation."))
    return section(
        "The swarm",
        f"<p>{escape(_lead(found, generations))}</p>",
        _shares(found.get("peers") or ()),
        _generations(generations),
        _gaps(found.get("gaps") or ()),
    )


def _lead(found: Row, generations: Sequence[Row]) -> str:
    began = found.get("began") or {}
    how = {
        "nothing": "with the first weights",
        "checkpoint": f"with a checkpoint of step {began.get('step')}",
        "member": f"with a member's state of step {began.get('step')}",
    }.get(str(began.get("with")), "")
    most = max(len(row["members"]) for row in generations)
    return (
        f"A step was dealt in {found.get('lanes')} lanes to {most} or fewer peers. This peer began"
        f" {how}, and saw {count(len(generations))}"
        f" generation{'s' if len(generations) > 1 else ''}."
    )


def _shares(peers: Sequence[Row]) -> str:
    lanes = sum(peer["lanes"] for peer in peers)
    if not lanes:
        return note("No step was committed.")
    rows = [
        (peer["name"], count(peer["lanes"]), percent(peer["lanes"] / lanes), count(peer["steps"]))
        for peer in peers
    ]
    bars = "".join(
        f"<div class=bar title='{escape(str(peer['name']), quote=True)}'>"
        f"<i style='width:{100 * peer['lanes'] / lanes:.2f}%'></i></div>"
        for peer in peers
    )
    return bars + table(("Peer", "Lanes computed", "Share", "Steps"), rows, words=(0,))


def _generations(generations: Sequence[Row]) -> str:
    listed = list(generations)
    left = len(listed) - MOST_ROWS
    if left > 0:
        listed = [*listed[: MOST_ROWS // 2], *listed[-MOST_ROWS // 2 :]]
    rows = [
        (
            count(row["generation"]),
            duration(row["seconds"]),
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


def _gaps(gaps: Sequence[Row]) -> str:
    if not gaps:
        return note("No generation ended unplanned, so there were no gaps.")
    seconds = sorted(gap["seconds"] for gap in gaps)
    return note(
        f"{count(len(gaps))} generation{'s' if len(gaps) > 1 else ''} ended unplanned. Until the"
        f" next one had begun this peer waited {brief(seconds[len(seconds) // 2])} (median),"
        f" {brief(seconds[-1])} at most, {brief(sum(seconds))} in all. No step was lost."
    )
