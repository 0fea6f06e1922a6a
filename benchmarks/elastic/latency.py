"""What a step costs beside its lanes, its reduce and its update: the headers and the vote."""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_table
from benchmarks.swarms.swarm import Nursery, Swarm

PEERS, STEPS, SMOKE_STEPS = (4, 2), 200, 20
"""Four is what was asked; two are as many as a small machine has cores for."""
CALLS = {"_exchange_headers": "a header", "_reduce": "the reduce", "_vote": "the vote"}
HEADERS = 2
"""A step without a fault has two rounds of headers: before the lanes and after them."""


def measure(options: Options) -> Report:
    """`repeats`: swarms."""
    steps = SMOKE_STEPS if options.smoke else STEPS
    report = Report("latency", "a commit costs milliseconds", {"peers": PEERS, "steps": steps})
    with tempfile.TemporaryDirectory() as place, Nursery() as nursery:
        for turn in range(options.rounds):
            for count in PEERS:
                report.rows += one(Path(place) / f"{count} {turn}", nursery, count, steps)
    rows = []
    for count in PEERS:
        medians = {
            name: 1e3 * statistics.median(r[name] for r in report.rows if r["peers"] == count)
            for name in CALLS
        }
        both = HEADERS * medians["_exchange_headers"] + medians["_vote"]
        rows.append([str(count), *(f"{medians[name]:.2f}" for name in CALLS), f"{both:.2f}"])
        report.asked.append(Target(f"headers and vote of {count} peers, p50", 10.0, both, "ms"))
    report.tables["Milliseconds, median of all peers' medians"] = format_table(
        ["peers", *CALLS.values(), "headers and vote"], rows
    )
    report.remarks = [
        f"A step has {HEADERS} rounds of headers. The second one waits for the slowest peer's"
        " lanes, which is counted here as well.",
        "Four peers take turns on this machine's cores if it has fewer than four: then most of"
        " their time is waiting for a core.",
    ]
    return report


def one(folder: Path, nursery: Nursery, count: int, steps: int) -> list[dict[str, Any]]:
    begin = {"do": "hold", "at": "attempt", "step": 0, "until": count}
    usual = {"steps": steps, "serves": False, "timed": list(CALLS), "faults": [begin]}
    found = []
    with Swarm(folder, nursery, heartbeat=30.0) as swarm:
        for peer in [swarm.peer(f"p{n}", **usual) for n in range(count)]:
            timed = peer.result(300)["timed"]
            # The first steps form generations; peers wait there for one another.
            medians = {name: statistics.median(timed[name][-steps:]) for name in CALLS}
            found.append({"peers": count, "peer": peer.name, **medians})
    return found
