"""What a node costs besides its own work: real plans and worst cases, with kernels that do nothing.

    bare      for run in runs: run()                     the ceiling: no order, no times, no errors
    serial    the reference engine                       threads   the one that overlaps copies

Copies move 64 bytes, and are a node each. With empty kernels nothing overlaps: every hand-over from
one thread to another is waited for, as it never is in a real step. CPU is that of all threads.
"""

import random
import statistics
from collections.abc import Callable
from ctypes import addressof, create_string_buffer, memmove
from functools import partial
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.process import time_call
from benchmarks.harness.report import Report, Target, format_spread, format_table
from benchmarks.offloading.synthetic import training_step
from offload import GraphBuilder, MemGraph, Runner, plan
from offload.graph.memgraph import TASK
from offload.planning.wanted import peak_bytes
from offload.running.engines.serial import Serial
from offload.running.engines.threads import Threads
from offload.running.engines.work import Engine, Record, Run, StepWork

ROUNDS = 7
COPIED = 64
SERIAL_US, THREADS_US = 1.0, 5.0
ORDERS = ("priority", "random")


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    tasks, rounds = (200, 2) if smoke else (4_000, max(15, repeats))
    here, there = create_string_buffer(COPIED), create_string_buffer(COPIED)
    works = _works(tasks, partial(memmove, addressof(there), addressof(here), COPIED))
    engines: dict[tuple[str, str], Engine] = {
        (name, order): made(order)
        for name, made in (("serial", Serial), ("threads", Threads))
        for order in ORDERS
    }
    rows = {
        (name, *engine): {"cpu": [], "wall": []}
        for name in works
        for engine in (("bare", ""), *engines)
    }
    try:
        for number in range(rounds + 1):
            for key in random.Random(number).sample(sorted(rows), len(rows)):
                work = works[key[0]]
                engine = engines.get(key[1:])
                cpu, wall, _ = time_call(
                    partial(_bare, work) if engine is None else partial(engine.run, work, Record())
                )
                if number:  # the first round warms up
                    rows[key]["cpu"].append(1e6 * cpu / len(work.runs))
                    rows[key]["wall"].append(1e6 * wall / len(work.runs))
    finally:
        for engine in engines.values():
            engine.close()
    whole = _whole_calls(tasks // 8, rounds)
    return _report(works, rows, whole, rounds)


def _works(tasks: int, copy: Run) -> dict[str, StepWork]:
    step = training_step(tasks)
    works = {"a plan, all resident (compute only)": _emptied(plan(step).memgraph, copy)}
    for share in (60, 30):
        planned = plan(step, peak_bytes(step, 0) * share // 100)
        works[f"a plan at {share} %"] = _emptied(planned.memgraph, copy)
    works["worst case: task, copy, task, copy, each waits"] = _alternating(tasks, copy)
    return works


def _nothing() -> None:
    pass


def _emptied(memgraph: MemGraph, copy: Run) -> StepWork:
    return StepWork.of(memgraph, [_nothing if n.kind == TASK else copy for n in memgraph.nodes])


def _alternating(nodes: int, copy: Run) -> StepWork:
    """Each waits for the one before it."""
    return StepWork(
        runs=[copy if node % 2 else _nothing for node in range(nodes)],
        lane_of=["h2d" if node % 2 else "compute" for node in range(nodes)],
        waits=[int(node > 0) for node in range(nodes)],
        successors=[(node + 1,) if node + 1 < nodes else () for node in range(nodes)],
        first=[0],
        lanes=["compute", "h2d"],
    )


def _bare(work: StepWork) -> None:
    for run in work.runs:
        run()


def _whole_calls(tasks: int, rounds: int) -> dict[tuple[str, str], dict[str, list[float]]]:
    """`runner()` of tasks that do nothing to a parameter each: what is around the loop, too."""
    builder = GraphBuilder()
    kernel: Callable[..., None] = lambda reads, writes: None  # noqa: E731, ARG005
    for number in range(tasks):
        b = builder.buffer(f"p{number}", 256, "parameter")
        builder.task(f"t{number}", [b], [b], kernel=kernel)
    graph = builder.graph()
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    for engine in ("serial", "threads"):
        seen: dict[str, list[float]] = {"cpu": [], "wall": []}
        with Runner(plan(graph, placement="copy"), engine) as runner:
            for number in range(rounds + 1):
                cpu, wall, _ = time_call(runner)
                if number:
                    seen["cpu"].append(1e6 * cpu / tasks)
                    seen["wall"].append(1e6 * wall / tasks)
        rows[engine, "priority"] = seen
    return rows


def _report(
    works: dict[str, StepWork],
    rows: dict[tuple[str, str, str], dict[str, list[float]]],
    whole: dict[tuple[str, str], dict[str, list[float]]],
    rounds: int,
) -> Report:
    report = Report(
        "overhead",
        "Claim: the loop costs <= 1 us a task in serial and <= 5 us with threads",
        {"rounds": rounds, "copied_bytes": COPIED, "time": "us a node, median [min, max]"},
    )
    lines: list[list[str]] = []
    for (name, engine, order), seen in rows.items():
        work = works[name]
        copies = sum(lane != "compute" for lane in work.lane_of)
        share = len(work.runs) / (len(work.runs) - copies)
        lines.append([
            name, f"{len(work.runs) - copies:,}", f"{copies:,}", engine, order,
            format_spread(seen["cpu"], ".2f"), format_spread(seen["wall"], ".2f"),
            f"{share * statistics.median(seen['cpu']):.2f}",
        ])  # fmt: skip
        report.rows.append({"work": name, "nodes": len(work.runs), "copies": copies,
                            "engine": engine, "order": order, **seen})  # fmt: skip
        most = {"serial": SERIAL_US, "threads": THREADS_US}.get(engine)
        if most is not None:
            report.asked.append(
                Target(f"{engine}, {order}, {name}", most, statistics.median(seen["cpu"]), "us")
            )
    head = ["work", "tasks", "copies", "engine", "order", "CPU us a node", "wall us a node",
            "CPU us a task, its copies included"]  # fmt: skip
    report.tables["The loop"] = format_table(head, lines)
    report.tables["The whole call, one small parameter a task"] = format_table(
        ["engine", "order", "CPU us a task", "wall us a task"],
        [[*key, format_spread(seen["cpu"], ".2f"), format_spread(seen["wall"], ".2f")]
         for key, seen in whole.items()],
    )  # fmt: skip
    whole_rows: list[dict[str, Any]] = [
        {"work": "whole call", "engine": key[0], "order": key[1], **seen}
        for key, seen in whole.items()
    ]
    report.rows += whole_rows
    report.remarks = [
        "A node is a task or a copy; what was asked is compared with CPU time a node.",
        "random draws a new legal order at every step, which only tests want.",
    ]
    return report
