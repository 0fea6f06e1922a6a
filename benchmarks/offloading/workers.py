"""Updates on the host by more and more workers, which share one and the same memory.

    at once   an address that an update has freed is given out at once
    held      it is held back while the workers go on (offload/planning/arena.py): ours
    never     no address is given out twice: what waits here waits for no address

n workers have an n-th of the memory's rate each, so the work of the host takes as long with any
number of them. What more of them cost is waiting. The steps are made up and priced by an H200's
rates, all updates on the host. Everything here is simulated.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from offload import Costs, GraphBuilder, Plan, TaskGraph, plan, simulate
from offload.graph.taskgraph import HOST
from offload.lowering.host_updates import host_updates
from offload.planning.planner import build_memgraph
from offload.planning.refusal import smallest_budget
from offload.planning.wanted import peak_bytes
from offloading.process import in_a_fresh_process
from offloading.report import Asked, Report, table
from offloading.stacks import Stack, Way, step
from offloading.steps import MIB
from offloading.synthetic import training_step

H200 = Costs(
    flops=7.3e14, memory=4.2e12, launch=6.9e-6, h2d=55.2e9, d2h=55e9, shared=0.91, copy=3.8e-6
)
"""benchmarks/results/2026-11-22_gpu_ceilings.md"""
HOST_MEMORY = 124e9
"""Bytes a second of all workers together."""
WORKERS = (1, 2, 4, 8, 16)
SHARE = 0.5
"""The budget, of what the step needs if nothing moves."""
MOST = 1.1
"""What a step of 16 workers may take of the step of one."""
HELD = 1.02
"""And of the step in which no address is given out twice."""
WAYS = {"at once": 0, "held": None, "never": 1 << 40}
"""`Policy.host_workers`; None: as planned."""


def measure(smoke: bool) -> Report:
    steps: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "like GPT-2 XL": (stacked, (Stack(2, 2, 64, 128, 64) if smoke else Stack(8),)),
        "made up": (made_up, (100 if smoke else 1_000,)),
        "equal layers": (equal, (8 if smoke else 128,)),
    }
    report = Report(
        "workers",
        "Claim: 16 workers of the host take at most 1.1 times as long as one of the same memory",
        {"GPU": "H200", "host GB/s": HOST_MEMORY / 1e9, "budget": f"{SHARE:.0%} of the peak"},
    )
    for name, (function, arguments) in steps.items():
        rows = in_a_fresh_process(function, *arguments)
        report.rows += [{"graph": name} | row for row in rows]
        report.tables[name] = _table(rows)
        one, most = rows[0]["held"]["ms"], rows[-1]
        report.asked += [
            Asked(f"{name}: 16 workers over 1", MOST, most["held"]["ms"] / one),
            Asked(f"{name}: held over never", HELD, most["held"]["ms"] / most["never"]["ms"]),
        ]
    report.remarks = [
        "floor: the work of the busiest lane. MiB: of host memory. planning: CPU seconds of"
        " plan(). at once, never: the plan that was found, with other addresses on the host.",
        "What `held` takes beyond 1 worker, `never` takes too, so it is no address: one of n"
        " workers takes n times as long for a cast, an update or the chunks of one, which write"
        " one parameter in turn. Real workers are less bound: one alone has all of the memory.",
    ]
    return report


def stacked(stack: Stack) -> list[dict[str, Any]]:
    """In a process of its own."""
    way = Way(clipped=False, on_host=False)
    return sweep(host_updates(step(stack, way), H200, "host"))


def made_up(tasks: int) -> list[dict[str, Any]]:
    """In a process of its own."""
    return sweep(host_updates(training_step(tasks), H200, "host"))


def equal(layers: int) -> list[dict[str, Any]]:
    """In a process of its own."""
    return sweep(host_updates(equal_layers(layers), H200, "host"))


def equal_layers(layers: int, nbytes: int = 16 * MIB) -> TaskGraph:
    """A weight a layer, all of one size. The host has more to do than the device."""
    builder = GraphBuilder()
    x = builder.buffer("x", MIB, "input")
    made: list[tuple[int, int]] = []
    for n in range(layers):
        made.append((builder.buffer(f"w{n}", nbytes, "parameter"), x))
        x = builder.buffer(f"a{n}", MIB, "activation")
        builder.task(f"f{n}", made[-1], [x], seconds=1e-4)
    for n, (w, read) in reversed(list(enumerate(made))):
        g = builder.buffer(f"g{n}", nbytes, "gradient")
        m = builder.buffer(f"m{n}", 2 * nbytes, "state")
        back, x = x, builder.buffer(f"d{n}", MIB, "gradient")
        builder.task(f"b{n}", [back, read, w], [g, x], phase="backward", seconds=2e-4)
        builder.task(f"u{n}", [w, m, g], [w, m], phase="update", traffic=7 * nbytes)
    builder.output(x)
    return builder.graph()


def sweep(graph: TaskGraph) -> list[dict[str, Any]]:
    least = smallest_budget(graph, 0)[0]
    rows: list[dict[str, Any]] = []
    for workers in WORKERS:
        costs = replace(H200, host_memory=HOST_MEMORY / workers, host_workers=workers)
        begin = time.process_time()
        made = plan(graph, max(int(SHARE * peak_bytes(graph, 0)), least), costs=costs)
        took = time.process_time() - begin
        work = made.simulation.busy
        floor = max(s / (workers if lane == "host" else 1) for lane, s in work.items())
        ways = {way: _again(made, costs, most) for way, most in WAYS.items()}
        rows.append({"workers": workers, "floor_ms": 1e3 * floor, "planning_s": took} | ways)
    return rows


def _again(made: Plan, costs: Costs, workers: int | None) -> dict[str, float]:
    """The plan that was found, with so many workers' addresses held back."""
    memgraph, policy = made.memgraph, made.found.policy
    if workers is not None:
        policy = replace(policy, host_workers=workers)
        seconds = [costs.of_task(task) for task in memgraph.graph.tasks]
        clock = [0.0, *itertools.accumulate(seconds)][:-1]
        capacities = {0: made.device_bytes}
        memgraph = build_memgraph(memgraph.graph, capacities, policy, clock)
    ms = 1e3 * simulate(memgraph, costs).makespan
    return {"ms": ms, "mib": memgraph.arenas[HOST] / MIB}


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["workers", "floor ms", *(f"{way}: ms (MiB)" for way in WAYS), "planning s"]
    return table(
        head,
        [
            [
                str(row["workers"]), f"{row['floor_ms']:.1f}",
                *(f"{row[way]['ms']:.1f} ({row[way]['mib']:.0f})" for way in WAYS),
                f"{row['planning_s']:.1f}",
            ]
            for row in rows
        ],
    )  # fmt: skip
