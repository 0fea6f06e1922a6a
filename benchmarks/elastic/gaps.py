"""How long a swarm stands: after a death, a frozen peer, and the deaths of an anchor and a peer.

A gap is what a step of the survivors took longer than their usual one, at the step at which it
happened. The kernel closes the connections of a process that dies, so nobody waits for a heartbeat.
"""

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.report import Report, Target, format_table
from benchmarks.swarms.faults import PHASES
from benchmarks.swarms.swarm import Nursery, Process, Swarm, free_ports, until

PEERS, STEPS, AT, ANCHOR_AT = 4, 40, 20, 12
HEARTBEAT = 2.0
USUAL: dict[str, Any] = {"steps": STEPS, "serves": False, "slow": 0.002, "checkpoints": 10}
BEGIN = {"do": "hold", "at": "attempt", "step": 0, "until": PEERS}


def fault(do: str, at: str, **more: Any) -> dict[str, Any]:
    return {"do": do, "at": at, "step": AT, "members": PEERS, **more}


def gap(peer: Process, when: float) -> float:
    """The step that was under way at that time, less a usual one."""
    ends = peer.result()["seconds"]
    usual = statistics.median(later - one for one, later in pairwise(ends))
    longest = max(later - one for one, later in pairwise(ends) if later >= when - usual)
    return longest - usual


def happened(peer: Process) -> float:
    return peer.happened()[-1]["when"]


def killed(folder: Path, nursery: Nursery, phase: str) -> dict[str, Any]:
    with Swarm(folder, nursery, heartbeat=HEARTBEAT) as swarm:
        dies = swarm.peer("dies", **USUAL, faults=[BEGIN, fault("kill", phase)])
        peers = [swarm.peer(f"p{n}", **USUAL, faults=[BEGIN]) for n in range(PEERS - 1)]
        for peer in peers:
            peer.wait()
        seconds = max(gap(peer, happened(dies)) for peer in peers)
        return {"what": "a death", "phase": phase, "gap": seconds}


def frozen(folder: Path, nursery: Nursery) -> dict[str, Any]:
    with Swarm(folder, nursery, heartbeat=HEARTBEAT) as swarm:
        stops = swarm.peer("stops", **USUAL, faults=[BEGIN, fault("stop", "compute")])
        peers = [swarm.peer(f"p{n}", **USUAL, faults=[BEGIN]) for n in range(PEERS - 1)]
        for peer in peers:
            peer.wait()
        seconds = max(gap(peer, happened(stops)) for peer in peers)
        return {"what": "a frozen peer", "phase": "compute", "gap": seconds}


def without_anchor(folder: Path, nursery: Nursery, and_peer: bool) -> dict[str, Any]:
    ports = free_ports(2)
    with Swarm(folder, nursery, own_anchor=False) as swarm:
        swarm.join = ",".join(f"127.0.0.1:{port}" for port in ports)
        usual = {"only_anchor": False, "heartbeat": HEARTBEAT}
        first = swarm.anchor("first", port=ports[0], **usual)
        swarm.anchor("second", port=ports[1], **usual, standby=True, follows=True)
        faults = [fault("kill_other", "mid_reduce", pid=first.pid)]
        if and_peer:
            faults.append(fault("kill", "mid_reduce"))
        one = swarm.peer("one", **USUAL, faults=[BEGIN, *faults])
        peers = [swarm.peer(f"p{n}", **USUAL, faults=[BEGIN]) for n in range(PEERS - 1)]
        results = [peer.result() for peer in peers]
        until(lambda: one.code is not None, "the end of the first peer", 60, one.said)
        return {
            "what": "an anchor and a peer die" if and_peer else "an anchor dies",
            "phase": "mid_reduce", "gap": max(gap(peer, happened(one)) for peer in peers),
            "steps lost": STEPS - min(result["step"] for result in results),
        }  # fmt: skip


def measure(options: Options) -> Report:
    """`repeats`: of everything. More of them say more of p95."""
    report = Report("gaps", "a swarm goes on at once", {"peers": PEERS, "heartbeat": HEARTBEAT})
    with tempfile.TemporaryDirectory() as place, Nursery() as nursery:
        for turn in range(options.rounds):
            folder = Path(place) / str(turn)
            for phase in PHASES[:2] if options.smoke else PHASES:
                report.rows.append(killed(folder / phase, nursery, phase))
            report.rows.append(frozen(folder / "frozen", nursery))
            report.rows.append(without_anchor(folder / "anchor", nursery, and_peer=False))
            report.rows.append(without_anchor(folder / "both", nursery, and_peer=True))
    kinds: dict[str, list[float]] = {}
    for row in report.rows:
        kinds.setdefault(row["what"], []).append(row["gap"])
    report.tables["Seconds that a step took longer"] = format_table(
        ["what", "times", "median", "p95", "most"],
        [[what, str(len(found)), f"{statistics.median(found):.3f}", f"{p95(found):.3f}",
          f"{max(found):.3f}"] for what, found in kinds.items()],
    )  # fmt: skip
    deaths = kinds["a death"]
    report.asked = [
        Target("gap after a death, p95", 0.5, p95(deaths), "s"),
        Target("gap after a death, most", 1.0, max(deaths), "s"),
        Target("gap of a frozen peer", HEARTBEAT + 0.5, max(kinds["a frozen peer"]), "s"),
        Target("steps lost by an anchor's death", 0,
              max(row.get("steps lost", 0) for row in report.rows)),
        Target("anchor and peer die: formed anew", 1.0,
               max(kinds["an anchor and a peer die"]), "s"),
    ]  # fmt: skip
    report.remarks = ["Processes are forked, and a step of these peers takes milliseconds."]
    return report


def p95(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 95 // 100) - 1)]
