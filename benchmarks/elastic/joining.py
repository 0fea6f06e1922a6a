"""What a newcomer costs the others while it copies, and the case in which hivemind lets none in.

16.8 million parameters, 201 MB with Adam's moments, 96 samples a step, links of 400 Mbps:
a step is shorter than a copy, so who copies a snapshot is out of date when it has it.
"""

import json
import statistics
import tempfile
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_table
from benchmarks.swarms.network import Network, available
from benchmarks.swarms.swarm import Nursery, Swarm, until

WIDTH, SMOKE_WIDTH = 16_800_000 // 13, 20_000
"""Of a net with 13 parameters a unit."""
MEGABITS = 400
BEFORE, AFTER = 12, 6
"""Steps before somebody comes, and after it has."""


def one(folder: Path, nursery: Nursery, width: int, net: Network | None) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "steps": 4000, "lanes": 12, "batch": 96, "samples": 960, "width": width, "serves": False,
        "norm": False, "dropout": 0.0,
    }  # fmt: skip

    def where(number: int) -> dict[str, Any]:
        if net is None:
            return {}
        return {"strategy": {"host": net.hosts[number]}, "namespace": net.names[number]}

    anchor: dict[str, Any] = {} if net is None else {"host": net.anchor_host}
    begin = {"do": "hold", "at": "attempt", "step": 0, "until": 2}
    with Swarm(folder, nursery, heartbeat=60.0, **anchor) as swarm:
        first = swarm.peer("a", **usual, **where(0), faults=[begin])
        swarm.peer("b", **usual, **where(1), faults=[begin])
        until(lambda: first.step >= BEFORE, "the first steps", 600, first.said)
        asked_at = first.step
        swarm.peer("c", **usual, **where(2))

        def joined_at() -> int | None:
            for line in first.log.read_text().splitlines():
                told = json.loads(line)
                if "c" in told.get("members", ()):
                    return told["step"]
            return None

        until(lambda: joined_at() is not None, "the newcomer", 900, first.said)
        joined = joined_at()
        assert joined is not None
        until(lambda: first.step >= joined + AFTER, "the steps after it", 600, first.said)
        first.kill(2)  # Ctrl-C: it leaves, and writes down when its steps ended
        first.wait()
        ends = json.loads(first.out.joinpath("result.json").read_text())["seconds"]
    steps = [later - before for before, later in pairwise(ends)]
    # Before step s + 1 ended, s steps were applied.
    usual_step = statistics.median(steps[2 : asked_at - 1])
    copying = steps[asked_at:joined] or [steps[joined - 1]]
    return {"before": usual_step, "while it copies": statistics.median(copying),
            "most": max(copying), "steps until it is in": joined - asked_at}  # fmt: skip


def measure(options: Options) -> Report:
    """`repeats`: swarms."""
    width = SMOKE_WIDTH if options.smoke else WIDTH
    emulated = available()
    report = Report(
        "joining", "a newcomer comes in, and holds nobody up",
        {"parameters": 13 * width + 4,
         "network": f"namespaces at {MEGABITS} Mbps" if emulated else "localhost"},
    )  # fmt: skip
    network = Network(3, MEGABITS) if emulated else nullcontext()
    with tempfile.TemporaryDirectory() as place, network as net, Nursery() as nursery:
        for turn in range(options.rounds):
            report.rows.append(one(Path(place) / str(turn), nursery, width, net))
    keys = ["before", "while it copies", "most", "steps until it is in"]
    report.tables["Seconds of a step"] = format_table(
        keys, [[f"{row[key]:.3g}" for key in keys] for row in report.rows]
    )
    slower = statistics.median(row["while it copies"] / row["before"] for row in report.rows)
    report.asked = [
        Target("a step while a newcomer copies, over one before", 1.2, slower),
        Target("newcomers that came in", options.rounds, len(report.rows), at_least=True),
    ]
    return report
