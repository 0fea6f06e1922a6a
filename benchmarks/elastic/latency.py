"""What a step costs beside its lanes, its reduce and its update: the headers and the vote."""

import statistics
import tempfile
from pathlib import Path

from offloading.report import Asked, Report, table

from benchmarks.swarms.swarm import Nursery, Swarm
from elastic.setting import Setting

PEERS, STEPS, SMOKE_STEPS = 4, 200, 20
CALLS = {"_exchanged": "a header", "_reduced": "the reduce", "_voted": "the vote"}
HEADERS = 2
"""A step without a fault has two rounds of headers: before the lanes and after them."""


def measure(asked: Setting) -> Report:
    """`repeats`: swarms."""
    steps = SMOKE_STEPS if asked.smoke else STEPS
    report = Report("latency", "a commit costs milliseconds", {"peers": PEERS, "steps": steps})
    begin = {"do": "hold", "at": "attempt", "step": 0, "until": PEERS}
    usual = {"steps": steps, "serves": False, "timed": list(CALLS), "faults": [begin]}
    with tempfile.TemporaryDirectory() as place, Nursery() as nursery:
        for turn in range(asked.repeats):
            with Swarm(Path(place) / str(turn), nursery, heartbeat=30.0) as swarm:
                peers = [swarm.peer(f"p{n}", **usual) for n in range(PEERS)]
                for peer in peers:
                    timed = peer.result(300)["timed"]
                    # The first steps form generations; peers wait there for one another.
                    found = {name: statistics.median(timed[name][-steps:]) for name in CALLS}
                    report.rows.append({"turn": turn, "peer": peer.name, **found})
    medians = {name: statistics.median(row[name] for row in report.rows) for name in CALLS}
    report.tables["Milliseconds, median of all peers' medians"] = table(
        ["what", "ms"], [[CALLS[name], f"{value * 1e3:.2f}"] for name, value in medians.items()]
    )
    both = (HEADERS * medians["_exchanged"] + medians["_voted"]) * 1e3
    report.asked = [Asked("headers and vote of a step, p50", 10.0, both, "ms")]
    report.remarks = [
        f"A step has {HEADERS} rounds of headers. The second one waits for the slowest peer's"
        " lanes, which is counted here as well."
    ]
    return report
