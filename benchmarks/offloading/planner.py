"""Seconds and memory of planning against the number of tasks, on made-up training steps.

A (number of tasks, budget) is measured in a process of its own. CPU seconds, for planning has one
thread. Where the time goes: the whole `plan()` is some walks, each followed by a simulation, and
at the end one reduction of the edges and one proof. The floor is one look at every dependency.
"""

import gc
import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.process import (
    read_memory_mib,
    reset_peak_memory,
    run_in_fresh_process,
    time_call,
)
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.offloading.synthetic import training_step
from offload import Costs, plan, simulate
from offload.memory.cpu_shim import available
from offload.planning.planner import Policy, build_memgraph
from offload.planning.reduction import reduced
from offload.planning.refusal import smallest_budget
from offload.planning.wanted import peak_bytes

ROUNDS = 7
SIZES = (1_000, 10_000, 100_000)
SHARES = (0.6, 0.3)
MOST_TASKS = 50_000
"""All repeats together: 100,000 tasks are planned once."""
STAGES = ("look", "walk", "reduction", "simulate", "verify", "plan")
HUNGRY = ("walk", "plan")
"""Peak memory of the others is above that of what they are given by little."""
SECONDS = {10_000: 10.0, 100_000: 150.0}
VERIFY_SECONDS = 10.0
EXPONENT = 1.2


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    sizes = (200, 400, 800) if smoke else SIZES
    rows = []
    for share in SHARES:
        for tasks in sizes:
            often = 1 if smoke else min(repeats, max(1, MOST_TASKS // tasks))
            rows.append(run_in_fresh_process(one, tasks, share, often))
            print(
                f"{tasks} tasks, {share:.0%}: {format_spread(rows[-1]['cpu']['plan'])} s",
                flush=True,
            )
    report = Report(
        "planner",
        "Claim: planning time grows no faster than n^1.2, and 100,000 tasks are planned in 150 s",
        {"repeats": repeats, "sizes": sizes, "time": "CPU seconds, median [min, max]"},
        rows=rows,
    )
    report.tables["Seconds"] = _seconds(rows)
    report.tables["Peak memory (RSS above the graph's own) and edges"] = _memory(rows)
    report.tables["Growth exponents"] = _growth(rows)
    for row in rows:
        name = f"{row['asked_tasks']:,} tasks, budget {row['share']:.0%}"
        if (most := SECONDS.get(row["asked_tasks"])) is not None:
            report.asked.append(Target(f"plan, {name}", most, _middle(row, "plan"), "s"))
        if row["asked_tasks"] == 10_000:
            report.asked.append(
                Target(f"verify, {name}: seconds", VERIFY_SECONDS, _middle(row, "verify"), "s")
            )
    for share in SHARES:
        for stage in ("walk", "plan"):
            exponent = _exponent([row for row in rows if row["share"] == share], stage)
            report.asked.append(
                Target(f"exponent, {stage}, budget {share:.0%}", EXPONENT, exponent)
            )
    report.remarks = [
        "A plan of a larger graph tries fewer policies (the column walks), so the exponent of the"
        " whole plan flatters; that of one walk does not.",
        "walk: with nothing resident, so that most is moved; reduction: of its edges.",
        "look: one pass over every dependency of the graph, the floor of any planner.",
    ]
    return report


def one(tasks: int, share: float, repeats: int) -> dict[str, Any]:
    """In a process of its own."""
    available()  # otherwise the first plan waits for the compiler
    graph, costs = training_step(tasks), Costs()
    budget = max(int(peak_bytes(graph, 0) * share) // 64 * 64, smallest_budget(graph, 0)[0])
    cpu: dict[str, list[float]] = {stage: [] for stage in STAGES}
    memory: dict[str, float] = {}
    alone = read_memory_mib(peak=False)

    def stage(name: str, function: Any) -> Any:
        gc.collect()  # what was thrown away before is not this stage's
        reset_peak_memory()
        seconds, _, result = time_call(function)
        cpu[name].append(seconds)
        memory.setdefault(name, read_memory_mib() - alone)
        return result

    facts: dict[str, Any] = {}
    for _ in range(repeats):
        stage("look", graph.dependencies)
        walked = stage("walk", lambda: build_memgraph(graph, {0: budget}, Policy()))
        deps = stage("reduction", lambda w=walked: reduced([node.deps for node in w.nodes]))
        planned = stage("plan", lambda: plan(graph, budget))
        stage("simulate", lambda p=planned: simulate(p, costs))
        stage("verify", planned.verify)
        facts = {
            "tasks": len(graph.tasks), "nodes": len(walked.nodes),
            "edges": sum(len(node.deps) for node in walked.nodes),
            "edges_left": sum(map(len, deps)), "walks": len(planned.found.tried),
            "budget": budget, "predicted": planned.predicted_seconds,
            "bound": planned.bound.seconds,
        }  # fmt: skip
    return {
        "asked_tasks": tasks, "share": share, "repeats": repeats, "cpu": cpu, "memory": memory,
        **facts,
    }  # fmt: skip


def _middle(row: dict[str, Any], stage: str) -> float:
    return statistics.median(row["cpu"][stage])


def _exponent(rows: Sequence[dict[str, Any]], stage: str) -> float:
    """The slope of the line through log seconds over log tasks."""
    x = [math.log(row["tasks"]) for row in rows]
    y = [math.log(max(_middle(row, stage), 1e-6)) for row in rows]
    return statistics.linear_regression(x, y).slope


def _names(row: dict[str, Any]) -> list[str]:
    return [f"{row['tasks']:,}", f"{row['share']:.0%}"]


def _seconds(rows: Sequence[dict[str, Any]]) -> str:
    head = ["tasks", "budget", "runs", "nodes", "walks", *STAGES]
    return format_table(
        head,
        [
            [
                *_names(row), str(row["repeats"]), f"{row['nodes']:,}", str(row["walks"]),
                *(format_spread(row["cpu"][stage]) for stage in STAGES),
            ]
            for row in rows
        ],
    )  # fmt: skip


def _memory(rows: Sequence[dict[str, Any]]) -> str:
    head = ["tasks", "budget", *(f"{s}, MiB" for s in HUNGRY), "edges", "reduced to", "share left"]
    return format_table(
        head,
        [
            [
                *_names(row), *(f"{row['memory'][stage]:.0f}" for stage in HUNGRY),
                f"{row['edges']:,}", f"{row['edges_left']:,}",
                f"{row['edges_left'] / row['edges']:.0%}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def _growth(rows: Sequence[dict[str, Any]]) -> str:
    """Over all sizes, and over the last two."""
    lines = []
    for share in SHARES:
        mine = [row for row in rows if row["share"] == share]
        for name, some in (("all sizes", mine), ("the last two", mine[-2:])):
            cells = [f"{_exponent(some, stage):.2f}" for stage in STAGES]
            lines.append([f"{share:.0%}", name, *cells])
    return format_table(["budget", "over", *STAGES], lines)
