"""Claim: on one device, jobs that take turns and hand it on during their host tails finish earlier
than one after the other, where updates run on the host; elsewhere turns gain nothing.

    python benchmarks/fleet_tails.py [--smoke] [--out DIR]

Two (or four) stacks like GPT-2 XL on one H200, each with the whole budget when it has the device.
Everything is simulated by the planner's own simulator, node by node, all jobs on one set of lanes:
one compute lane, one link whose directions slow each other down, one host worker with all of the
host's memory rate. (Several workers would wait for each other in a plan of one job, and two jobs
would then look faster than they are.) Alone is each job's fastest plan, one job after the other.
"""

import argparse
import datetime
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offloading.report import Report, command, table, write
from offloading.stacks import Stack, Way, halves, step
from offloading.turns import Turn, Windowed, in_turns, in_windows
from offloading.workers import H200, HOST_MEMORY
from provenance import provenance

from offload import BudgetTooSmall, Plan, TaskGraph, plan, simulate
from offload.planning.host_tails import tail_seconds

RESULTS = Path(__file__).parent / "results"
COSTS = replace(H200, host_memory=HOST_MEMORY, host_workers=1)
GIB = 2**30
BUDGET = 8 * GIB
SHARES = (1.0, 0.5, 0.25, 0.0)
"""Of the budget, for plans with fewer and fewer residents; 0: the smallest."""
WINDOWS = (0.5, 1.0, 2.0)
"""GiB for updates beside another job's passes."""
BATCHES = (16, 32, 64)
"""Of the jobs in windows: more and more compute beside the same link."""
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan of a job, by itself and in turns."""

    name: str
    seconds: float
    turn: Turn
    tails: bool
    """Whether it was planned with `tails=True`."""
    host: int


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    stack: Stack
    way: Way


def planned(graph: TaskGraph, nbytes: int, tails: bool = False) -> Plan:
    return plan(graph, nbytes, COSTS, placement="copy", recompute=False, proven=False, tails=tails)


def candidates(job: Job, budget: int) -> tuple[Plan, list[Candidate]]:
    """The plan for the whole budget, and all that may take turns."""
    graph = step(job.stack, job.way)
    whole = planned(graph, budget)
    found: list[Candidate] = []
    for share in SHARES:
        nbytes = max(int(share * budget), whole.smallest_bytes)
        for tails in (False, True) if job.way.on_host else (False,):
            made = planned(graph, nbytes, tails)
            name = f"{nbytes / GIB:.1f} GiB{', tails=True' if tails else ''}"
            turn = Turn.of(made.memgraph)
            found.append(Candidate(name, made.predicted_seconds, turn, tails, made.host_bytes))
    return whole, found


def busy(wholes: Iterable[Plan]) -> dict[str, float]:
    """Seconds of each lane, all jobs together; both directions of the link as one, too."""
    lanes: dict[str, float] = {}
    for whole in wholes:
        for lane, seconds in whole.bound.parts.items():
            if lane != "critical path":
                lanes[lane] = lanes.get(lane, 0.0) + seconds
    return lanes


def best(
    jobs: Sequence[Sequence[Candidate]], tails: bool, planned_so: bool
) -> tuple[float, tuple[Candidate, ...]]:
    """Seconds of a round of the best plans that are found. Equal jobs have equal plans."""
    kinds = list({id(found): found for found in jobs}.values())
    some = [[c for c in found if planned_so or not c.tails] for found in kinds]
    tried: list[tuple[float, tuple[Candidate, ...]]] = []
    for chosen in itertools.product(*some):
        of = {id(found): one for found, one in zip(kinds, chosen, strict=True)}
        mine = tuple(of[id(found)] for found in jobs)
        seconds = in_turns([one.turn for one in mine], ROUNDS, COSTS, tails) / ROUNDS
        tried.append((seconds, mine))
    return min(tried, key=lambda one: one[0])


def pairs(smoke: bool) -> dict[str, list[Job]]:
    def job(batch: int, clipped: bool, on_host: bool) -> Job:
        stack = Stack(batch, 2, 64, 128, 64) if smoke else Stack(batch)
        where = "host" if on_host else "device"
        name = f"b{batch} {where}{', clipped' if clipped else ''}"
        return Job(name, stack, Way(clipped, on_host))

    streamed = [job(8, False, False), job(16, False, False)]
    clipped, hosted = job(16, True, False), job(16, True, True)
    found = {"b8 + b16, streamed": streamed, "b16 clipped, state streamed, x2": [clipped] * 2}
    found["b16 host optimizer + clip, x2"] = [hosted] * 2
    if not smoke:
        found["b16 host optimizer + clip, x4"] = [hosted] * 4
        found["b16 host optimizer, b64 streamed"] = [job(16, False, True), job(64, False, False)]
        found["b64 host optimizer + clip, x2"] = [job(64, True, True)] * 2
    return found


def turns(report: Report, smoke: bool) -> None:
    known: dict[str, tuple[Plan, list[Candidate]]] = {}
    lines, chosen = [], []
    for name, jobs in pairs(smoke).items():
        for job in jobs:
            if job.name not in known:
                budget = _small(step(job.stack, job.way)) if smoke else BUDGET
                known[job.name] = candidates(job, budget)
        wholes = [known[job.name][0] for job in jobs]
        found = [known[job.name][1] for job in jobs]
        alone = sum(min(one.seconds for one in some) for some in found)
        lanes = busy(wholes)
        lane = max(lanes, key=lambda key: lanes[key])
        row: dict[str, Any] = {"pair": name, "alone": alone, "lanes": lanes}
        ways = {"turns": (False, False), "tails": (True, False), "tails=True": (True, True)}
        cells = []
        for way, (tails, planned_so) in ways.items():
            seconds, mine = best(found, tails, planned_so)
            row[way] = {"seconds": seconds, "plans": [one.name for one in mine]}
            cells.append(f"{alone / seconds:.2f}")
            one = mine[0]
            left = simulate(one.turn.memgraph, COSTS).timeline
            chosen.append([
                name, way, "; ".join(dict.fromkeys(m.name for m in mine)),
                f"{sum(m.turn.resident for m in mine) / GIB:.2f}",
                f"{tail_seconds(one.turn.memgraph, left):.3f}", f"{one.host / GIB:.1f}",
                f"{seconds:.3f}",
            ])  # fmt: skip
        report.rows.append(row)
        lines.append([name, f"{alone:.3f}", f"{alone / lanes[lane]:.2f} ({lane})", *cells])
        print(" | ".join(lines[-1]), flush=True)
    head = ["jobs", "alone s", "bound", "turns", "host tails", "host tails, tails=True"]
    report.tables["Gain over one job after the other"] = table(head, lines)
    head = ["jobs", "way", "plans", "swapped GiB", "tail s", "host GiB", "a round s"]
    report.tables["Which plans were best"] = table(head, chosen)


def windows(report: Report, smoke: bool) -> None:
    lines: list[list[str]] = []
    for batch in BATCHES[: 1 if smoke else None]:
        stack = Stack(batch, 2, 64, 128, 64) if smoke else Stack(batch)
        graph = step(stack, Way(clipped=True, on_host=False))
        budget = 2 * _small(graph) if smoke else BUDGET
        alone = planned(graph, budget).predicted_seconds
        halved = halves(stack)
        for share in (0.3, 0.5) if smoke else (w * GIB / budget for w in WINDOWS):
            lines.append(_window(report, batch, halved, budget, int(share * budget), alone))
            print(" | ".join(lines[-1]), flush=True)
    head = [
        "batch", "T GiB", "gain", "passes in GiB", "first on a lane", "a job's step s", "alone s",
        "halves alone s", "work of the lanes a step", "at least s",
    ]  # fmt: skip
    title = "Two clipped jobs: updates in T bytes, beside the other's passes"
    report.tables[title] = table(head, [line + [""] * (len(head) - len(line)) for line in lines])


def _window(
    report: Report,
    batch: int,
    halved: tuple[TaskGraph, TaskGraph],
    budget: int,
    window: int,
    alone: float,
) -> list[str]:
    """A row: the best of several plans of the passes, and of who comes first on a lane."""
    passes, updates = halved
    name = [f"b{batch}", f"{window / GIB:.1f}"]
    try:
        second = planned(updates, window)
    except BudgetTooSmall as refused:
        return [*name, f"no plan: {refused.needed / GIB:.2f} GiB needed"]
    smallest = planned(passes, budget).smallest_bytes
    tried = []
    for part in (1.0, 0.75, 0.5, 0.25):
        if (nbytes := int(part * (budget - window))) >= smallest:
            job = Windowed(planned(passes, nbytes), second)
            for first in (False, True):
                seconds = in_windows([job, job], ROUNDS, COSTS, first) / ROUNDS
                tried.append((seconds, nbytes, first, job))
    if not tried:
        return [*name, f"no plan: {smallest / GIB:.2f} GiB needed beside it"]
    seconds, nbytes, first, job = min(tried, key=lambda one: one[0])
    both = busy((job.passes, job.updates))
    lane = max(both, key=lambda key: both[key])
    gain = 2 * alone / seconds
    report.rows.append({"batch": batch, "window": window, "gain": gain, "lanes": both})
    return [
        *name, f"{gain:.2f}", f"{nbytes / GIB:.1f}", "updates" if first else "passes",
        f"{seconds / 2:.3f}", f"{alone:.3f}",
        f"{job.passes.predicted_seconds:.3f} + {job.updates.predicted_seconds:.3f}",
        ", ".join(f"{k} {v:.3f}" for k, v in sorted(both.items())), f"{lane} {both[lane]:.3f}",
    ]  # fmt: skip


def _small(graph: TaskGraph) -> int:
    """A budget for a smoke run in which something moves."""
    whole = plan(graph, None, COSTS, placement="copy", recompute=False)
    return max(whole.smallest_bytes, whole.peak_bytes // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="see that it works: seconds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    report = Report(
        "fleet_tails",
        "Claim: handing a device on during host tails is worth 1.1 to 1.4 of one job after another",
        {"rates": "H200", "budget": "8 GiB", "rounds": ROUNDS, "model": str(Stack(16))},
    )
    turns(report, args.smoke)
    windows(report, args.smoke)
    report.remarks = [
        "Simulated: no GPU ran any of it. bound: work of the busiest lane, all jobs together, in"
        " the plans that each job has alone.",
        "turns: the device is handed on after whole steps. Every hand-over parks all residents and"
        " brings the next job's in, one after the other, and nothing overlaps with that.",
        "tails=True: no byte of the host is given out twice within a step, so no gradient's copy"
        " to the host waits for an update there. That takes more of the host's memory. Without it,"
        " gradients that find room on the device stay there until the host comes to them.",
        "at least: the work of the busiest lane of both halves; nothing can be faster in windows.",
    ]
    print(write(report, args.out / f"{args.date}_fleet_tails", provenance(), command()), flush=True)


if __name__ == "__main__":
    main()
