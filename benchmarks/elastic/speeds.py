"""Three peers of speeds 1 : 2 : 3, 16 lanes a peer: how near their steps are to the ideal.

Lanes sleep, so the machine's cores limit little. The ideal step gives each peer lanes by its speed,
in fractions: lanes / (sum of the speeds). A speed is measured: the lanes that a peer computes in a
second of computing. Beside it stands the ideal by the sleeps alone, as if a lane took nothing else.
"""

import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.swarms.swarm import Nursery, Swarm

SPEEDS = (1, 2, 3)
LANES = 16 * len(SPEEDS)
SLOWEST = 0.125
"""Seconds of a lane at the slowest peer: an ideal step takes a second."""
STEPS, SMOKE_STEPS, WARM = 40, 8, 4


def one(folder: Path, nursery: Nursery, steps: int, slowest: float) -> dict[str, Any]:
    begin = {"do": "hold", "at": "attempt", "step": 0, "until": len(SPEEDS)}
    usual = {
        "steps": steps, "lanes": LANES, "batch": LANES * 4, "samples": 2000, "serves": False,
        "timed": ["_compute"], "faults": [begin],
    }  # fmt: skip
    with Swarm(folder, nursery, heartbeat=30.0) as swarm:
        peers = [swarm.peer(f"p{speed}", **usual, slow=slowest / speed) for speed in SPEEDS]
        results = [peer.result(600) for peer in peers]
        dealt = lanes_of(peers[0].log)[WARM:]
    ends = results[0]["seconds"][WARM:]
    step = statistics.median(later - one for one, later in pairwise(ends))
    computing = [result["timed"]["_compute"][-steps + WARM :] for result in results]
    rates = [
        sum(lanes[peer.name] for lanes in dealt) / sum(seconds)
        for peer, seconds in zip(peers, computing, strict=True)
    ]
    ideal, asleep = LANES / sum(rates), LANES / sum(speed / slowest for speed in SPEEDS)
    lanes = statistics.median(max(several) for several in zip(*computing, strict=True))
    return {"step": step, "lanes": lanes, "ideal": ideal, "asleep": asleep, "share": ideal / step,
            "share of lanes": ideal / lanes, "share by sleeps": asleep / step}  # fmt: skip


def lanes_of(log: Path) -> list[dict[str, int]]:
    """How many lanes each peer added at each step."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        {name: len(lanes) for name, lanes in line["added"]} for line in lines if "added" in line
    ]


def measure(options: Options) -> Report:
    """`repeats`: swarms."""
    steps, slowest = (SMOKE_STEPS, SLOWEST / 10) if options.smoke else (STEPS, SLOWEST)
    report = Report("speeds", "no peer waits for a slower one", {"lanes": LANES, "steps": steps})
    with tempfile.TemporaryDirectory() as place, Nursery() as nursery:
        for turn in range(options.rounds):
            report.rows.append(one(Path(place) / str(turn), nursery, steps, slowest))
    keys = ("step", "lanes", "ideal", "share", "share of lanes", "asleep", "share by sleeps")
    report.tables["Peers of speeds 1 : 2 : 3"] = format_table(
        ["step", "its lanes", "ideal step", "share of the ideal", "of lanes alone",
         "ideal by sleeps", "share of that"],
        [[format_spread([row[key] for row in report.rows]) for key in keys]],
    )  # fmt: skip
    share = statistics.median(row["share"] for row in report.rows)
    report.asked = [Target("of the ideal, the whole step", 0.96, share, at_least=True)]
    return report
