"""Steps of language models on several cards: our plans beside RoundPipe's order, on paper.

    [simulated]  our planner and simulator, with rates that are assumed; no card was there
    [measured]   planning and issuing on this machine

Both orders go through one simulator. RoundPipe's speed is its steady state; ours is a whole step,
with its beginning and its end, and every bit is that of one device.
"""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks.harness.command import Options
from benchmarks.harness.process import read_memory_mib, run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_table
from benchmarks.offloading.language_steps import (
    LLAMA_8B,
    QWEN_32B,
    Machine,
    Workload,
    h100,
    rtx4090,
    step_of,
)
from benchmarks.offloading.round_robin import RoundRobin
from offload import Plan, plan
from offload.graph.memgraph import RELOAD, SEND
from offload.graph.taskgraph import Role
from offload.live.session import LiveSession
from offload.lowering.device_order import list_device_orders
from offload.lowering.device_placing import place_tasks
from offload.planning.issue import DEPTH, Chart, Issue
from offload.planning.planner import build_memgraph
from offload.planning.policies import Policy

ROUNDS = 3
NEAR = 0.05
"""How far RoundPipe's order may be from what RoundPipe published."""
CARDS = (1, 2, 4, 8)
CEILING = "ceiling: two processes with a step each"
TOGETHER = 16
"""So many steps of two processes run at the same time, but for the first ones."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step on a machine."""

    name: str
    work: Workload
    machine: Machine
    published: float | None = None
    """RoundPipe's tokens a second."""
    least: float | None = None
    """The tokens a second that were asked for."""


CASES = (
    Case("8B", Workload(LLAMA_8B), rtx4090(), 24_275, 29_000),
    Case("32B, computed again", Workload(QWEN_32B, again=True), rtx4090(), 5_516, 5_700),
    Case("8B LoRA", Workload(LLAMA_8B, 64, frozen=True), rtx4090()),
    Case("8B on H100", Workload(LLAMA_8B, 64, 4096), h100()),
)


def measure(options: Options) -> Report:
    report = Report(
        "several_devices",
        "Claim: eight RTX 4090 train an 8B model at 29,000 tokens a second or more, bit for bit",
        {"cards": 8, "time": "simulated, where nothing else is said"},
    )
    for case in CASES:
        if not options.only or case.name in options.only:
            if options.smoke:
                case = replace(case, work=replace(case.work, micro_batches=8))
            report.rows.append(run_in_fresh_process(simulate_case, case))
    rows = report.rows
    report.tables["[simulated] tokens a second"] = format_table(
        ["step", "machine", "tokens", "ours", "compute bound", "RoundPipe's order", "ours over it",
         "published", "deviation", "binds"],
        [_cells(row) for row in rows],
    )  # fmt: skip
    report.tables["[measured] planning"] = format_table(
        ["step", "tasks", "nodes", "plans tried", "seconds", "GB at most", "times a weight comes"],
        [[row["case"], f"{row['tasks']:,}", f"{row['nodes']:,}", str(row["tried"]),
          f"{row['planning']:.0f}", f"{row['memory'] / 1e9:.2f}", f"{row['crossings']:.2f}"]
         for row in rows],
    )  # fmt: skip
    report.asked = _targets(rows)
    issued = [run_in_fresh_process(issue_nodes, k, 2 if options.smoke else 16) for k in CARDS]
    report.rows += issued
    report.tables["[measured] host seconds to issue a node"] = format_table(
        ["cards", "nodes", "us a node"],
        [[str(r["cards"]), f"{r['nodes']:,}", f"{1e6 * r['seconds']:.1f}"] for r in issued],
    )
    report.rows.append(run_in_fresh_process(time_arenas, 1 if options.smoke else 5))
    overlap: dict[str, list[float]] = report.rows[-1]["overlap"]
    best = max(median(ratios) for name, ratios in overlap.items() if name != CEILING)
    report.asked.append(Target("two arenas of a CPU over one", 1.7, best, "", True))
    report.tables["[measured] steps of a six-layer GPT, on one arena over on two"] = format_table(
        ["a thread each", "median", "lowest", "highest"],
        [[name, *(f"{of(ratios):.2f}" for of in (median, min, max))]
         for name, ratios in overlap.items()],
    )  # fmt: skip
    report.remarks = [
        "Assumed: RTX 4090: 25 GB/s a link each way, which two cards share; DRAM 200 GB/s, of which"
        " Adam gets 160; 22 GB of a card. 193 TFLOP/s is calibrated on RoundPipe's one-card speed."
        " H100: 600 TFLOP/s, 50 GB/s a link, DRAM 400 GB/s, Adam 300, 300 GB/s between cards.",
        "Assumed: bf16 weights and sums, 12 bytes of state and 28 bytes of traffic a parameter for"
        " Adam; the head makes its logits in pieces; norms and activation functions cost nothing."
        " Micro-batches are one sequence; no clipping by norm.",
        "A byte that is sent through the host goes over both links at once and twice over DRAM.",
        "Ours is exact. RoundPipe's order is with stale weights, its default.",
    ]  # fmt: skip
    return report


def simulate_case(case: Case) -> dict[str, Any]:
    """In a process of its own, because of its memory."""
    work, machine = case.work, case.machine
    graph = step_of(work, machine.flops)
    begin = time.perf_counter()
    found = plan(graph, machine.memory, machine.costs, optimizer="auto", devices=machine.cards)
    planning, memory = time.perf_counter() - begin, read_memory_mib() * 2**20
    seconds = sum(task.seconds or 0.0 for task in graph.tasks) / machine.cards
    ours = work.all_tokens / found.predicted_seconds
    again = replace(work, again=False)
    return {
        "case": case.name, "machine": machine.name, "tokens": work.all_tokens,
        "ours": ours, "bound": work.all_tokens / seconds, "binds": _what_binds(found),
        "stale": RoundRobin(again, machine).tokens_per_second(),
        "published": case.published, "least": case.least, "tasks": len(found.graph.tasks),
        "nodes": len(found.memgraph.nodes), "tried": len(found.found.tried),
        "planning": planning, "memory": memory, "crossings": _count_crossings(found),
        "explained": found.explain(),
    }  # fmt: skip


def _count_crossings(found: Plan) -> float:
    """How often a weight comes to a device in a step, on average over their bytes."""
    buffers = found.graph.buffers
    weights = {b for b, buffer in enumerate(buffers) if buffer.role is Role.PARAMETER}
    come = [
        n.nbytes for n in found.memgraph.nodes if n.kind in (RELOAD, SEND) and n.buffer in weights
    ]
    return sum(come) / sum(buffers[b].nbytes for b in weights)


def _what_binds(found: Plan) -> str:
    """The busiest parts, as shares of the step."""
    parts = sorted(found.bound.parts.items(), key=lambda part: -part[1])[:2]
    return ", ".join(f"{name} {seconds / found.predicted_seconds:.0%}" for name, seconds in parts)


def _cells(row: dict[str, Any]) -> list[str]:
    published = row["published"]
    return [
        row["case"], row["machine"], f"{row['tokens']:,}", f"{row['ours']:,.0f}",
        f"{row['bound']:,.0f} ({row['ours'] / row['bound']:.0%})", f"{row['stale']:,.0f}",
        f"{row['ours'] / row['stale']:.2f}", f"{published:,}" if published else "",
        f"{row['stale'] / published - 1:+.1%}" if published else "", row["binds"],
    ]  # fmt: skip


def _targets(rows: list[dict[str, Any]]) -> list[Target]:
    targets: list[Target] = []
    for row in rows:
        name = row["case"]
        if row["least"]:
            targets.append(Target(name, row["least"], row["ours"], "tokens a second", True))
        if row["published"]:
            off = abs(row["stale"] / row["published"] - 1)
            targets.append(Target(f"{name}: RoundPipe's order, off what it published", NEAR, off))
        elif "LoRA" in name:
            over = row["ours"] / row["stale"]
            targets.append(Target(f"{name}: over streamed and computed again", 1.4, over, "", True))
        else:
            share = row["ours"] / row["bound"]
            targets.append(Target(f"{name}: share of the compute bound", 0.85, share, "", True))
        if name == "8B":
            targets.append(Target("8B: planning", 60, row["planning"], "s"))
            targets.append(Target("8B: memory of planning", 2, row["memory"] / 1e9, "GB"))
    return targets


def time_arenas(rounds: int) -> dict[str, Any]:
    """How much faster steps of a six-layer GPT are on two arenas of the CPU with a thread each than
    on one; and what two processes do at once that have nothing to do with each other. Interleaved.
    """
    torch.set_num_threads(1)
    overlap: dict[str, list[float]] = {}
    for _ in range(rounds):
        for many in (4, 8):
            alone = _time_steps(1, many)
            found = overlap.setdefault(f"{many} micro-batches", [])
            found.append(alone / _time_steps(2, many))
        overlap.setdefault(CEILING, []).append(2 * alone / _time_two_processes(many))
    return {"overlap": overlap}


def _time_two_processes(micro_batches: int) -> float:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn, torch.set_num_threads, (1,)) as pool:
        return max(pool.map(_time_steps, (1, 1), (micro_batches,) * 2, (TOGETHER,) * 2))


def _time_steps(devices: int, micro_batches: int, steps: int = 6) -> float:
    """The median seconds of a step that has its plan."""
    torch.manual_seed(0)
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(0, 256, (micro_batches, 4, 128))
    took: list[float] = []
    with LiveSession(model, optimizer, budget="100%", devices=devices) as session:
        for _ in range(steps):
            begin = time.perf_counter()
            with session.step():
                for batch in tokens:
                    model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            took.append(time.perf_counter() - begin)
    return median(took[2:])


def small_gpt() -> torch.nn.Module:
    layers = [
        torch.nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
        for _ in range(6)
    ]
    return torch.nn.Sequential(torch.nn.Embedding(256, 256), *layers, torch.nn.Linear(256, 256))


def issue_nodes(cards: int, micro_batches: int) -> dict[str, Any]:
    """What a host takes to decide on the next node, when all that was issued completes at once."""
    machine = rtx4090(cards)
    graph = step_of(Workload(LLAMA_8B, micro_batches), machine.flops)
    placed = place_tasks(graph, cards, machine.costs)
    _, ordered = list_device_orders(placed, machine.costs, {})[-1]
    capacities = dict.fromkeys(ordered.devices, machine.memory // 64 * 64)
    nodes = build_memgraph(ordered, capacities, Policy(drop_ahead=64)).nodes
    after: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        for dep in node.deps:
            after[dep].append(number)
    chart = Chart.from_lanes([node.lane for node in nodes], after, ("host",))
    seconds: list[float] = []
    for _ in range(ROUNDS):
        issue = Issue(chart, DEPTH, {"host": 2})
        begin = time.process_time()
        while issue.unissued:
            issued = issue.next()
            if issued is None:
                issue.complete(issue.marks()[0])
            elif nodes[issued.node].lane == "host":
                issue.complete(issued.node)
        seconds.append((time.process_time() - begin) / len(nodes))
    return {"cards": cards, "nodes": len(nodes), "seconds": min(seconds)}
