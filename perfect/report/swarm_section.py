"""The section of a run that several nodes have trained: generations, gaps, who computed how much.

run.json, elastic --> peers: a bar for each, and what it did | generations: a table
                      gaps: how many and how long, in all and by phase

Everything is told as one peer has seen it, from the step at which it came in.
"""

from collections.abc import Mapping, Sequence
from html import escape
from math import inf
from typing import Any

from perfect.report import words
from perfect.report.page import note, section, table
from perfect.report.results import Run
from perfect.report.words import DASH, brief, count, percent, size

Row = Mapping[str, Any]  # Any: rows of run.json
MOST_ROWS = 40
"""A long run may have a thousand generations; the first and the last ones are listed."""
MEANINGS = (
    "Samples/s: while the peer computed lanes, and waited for their samples. Utilisation: the share"
    " of the time in the swarm in which it did so. Sent: the bytes of sums that it gave to other"
    " members in reduces, without the last one."
)


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
        _gaps(found.get("gaps") or (), run.rows("phases")),
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
            count(_ratio(peer, "samples", "seconds")),
            percent(_ratio(peer, "seconds", "present")),
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


def _ratio(peer: Row, over: str, under: str) -> float | None:
    """Return None where nobody has counted."""
    return peer[over] / peer[under] if peer.get(under) else None


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
    median, longest, whole = _waited(gaps)
    told = note(
        f"{words.counted(len(gaps), 'generation')} ended unplanned. Until the"
        f" next one had begun this peer waited {median} (median), {longest} at most, {whole} in"
        " all. No step was lost."
    )
    if len(phases) < 2:
        return told
    ends = [phase["first_step"] for phase in phases[1:]]
    rows = []
    for phase, first, end in zip(phases, [0, *ends], [*ends, inf], strict=True):
        own = [gap for gap in gaps if first <= gap["step"] < end]
        rows.append((phase["name"], count(len(own)), *(_waited(own) if own else [DASH] * 3)))
    head = ("Phase", "Gaps", "Median", "Longest", "In all")
    return told + table(head, rows, words=(0,))


def _waited(gaps: Sequence[Row]) -> list[str]:
    """Return the median, the longest and all seconds of gaps."""
    seconds = sorted(gap["seconds"] for gap in gaps)
    return [brief(one) for one in (seconds[len(seconds) // 2], seconds[-1], sum(seconds))]
