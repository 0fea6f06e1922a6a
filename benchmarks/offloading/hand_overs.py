"""What it takes to hand a stage over: residents out, and in again before their job's next step.

    ours    other job comes: park -> waiting place         back: settle -> the device's arena
    floor   copy_ of as many bytes, in one piece, each way                        (one memcpy)
    alike   copy_ of every tensor's bytes by itself, each way       (the same number of copies)

Wall seconds, as the stage counts them (`Stage.swaps`). Rounds interleave the three; ratios are
those of one round. On the CPU the device's arena is ordinary memory, too, so this measures what
the host does around the copies; a link only makes the copies slower.
"""

import statistics
import time
from typing import Any

import torch

from benchmarks.harness.command import Options
from benchmarks.harness.process import run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_spread, format_table
from offload import Costs, Runner, plan
from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import TaskGraph
from offload.program.kernels import CPU, Program, Value
from offload.running.stage import Stage

ROUNDS = 7
MIB = 2**20
MOST = 1.2
"""Times the seconds of the copies."""
CASES = {"148 tensors of 2 MiB": (148, 2 * MIB), "1,000 of 256 KiB": (1000, 256 << 10)}
SMOKE = {"8 tensors of 4 KiB": (8, 4096)}


def measure(options: Options) -> Report:
    smoke, repeats = options.smoke, options.rounds
    report = Report(
        "hand_overs",
        f"Claim: park and unpark take at most {MOST} times as long as copies of the same bytes",
        {"repeats": repeats, "time": "wall seconds, median [min, max]"},
    )
    lines = []
    for name, (count, nbytes) in (SMOKE if smoke else CASES).items():
        row = run_in_fresh_process(one, count, nbytes, repeats)
        report.rows.append({"case": name} | row)
        over = {key: [a / b for a, b in zip(row["ours"], row[key], strict=True)]
                for key in ("floor", "alike")}  # fmt: skip
        cells = [format_spread([1e3 * s for s in row[key]]) for key in ("ours", "floor", "alike")]
        lines.append([name, *cells, *(f"{statistics.median(over[k]):.2f}" for k in over)])
        report.asked.append(
            Target(f"over the floor, {name}", MOST, statistics.median(over["floor"]))
        )
    head = ["residents", "ours ms", "floor ms", "alike ms", "over the floor", "over alike"]
    report.tables["A hand-over and back"] = format_table(head, lines)
    report.remarks = ["Before the first round every page was touched once."]
    return report


def job(count: int, nbytes: int) -> TaskGraph:
    """A step over so many parameters, of which it changes one byte."""
    builder = GraphBuilder()
    weights = [builder.buffer(f"w{n}", nbytes, "parameter") for n in range(count)]
    builder.task("touch", weights, weights[:1], kernel=_touch)
    tensors = {f"w{n}": torch.zeros(nbytes, dtype=torch.uint8) for n in range(count)}
    loss = Value(weights[0], torch.uint8, (1,), (1,))
    return builder.graph(Program((), (loss,), tensors))


def _touch(_: Any, writes: Any) -> None:
    writes[0][:1].add_(1)


def one(count: int, nbytes: int, repeats: int) -> dict[str, Any]:
    """In a process of its own."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"ours": [], "floor": [], "alike": []}
    here, there = (torch.ones(count, nbytes, dtype=torch.uint8) for _ in range(2))
    with Stage(CPU, "serial") as stage:
        plans = [plan(job(count, nbytes), costs=Costs(), placement="copy") for _ in range(2)]
        runners = [Runner(made, stage=stage) for made in plans]
        for round_ in range(repeats + 2):
            runners[0]()
            runners[1]()
            before = stage.swaps
            runners[0]()  # the other one out, this one in
            after = stage.swaps
            assert after.in_bytes - before.in_bytes == count * nbytes
            begin = time.perf_counter()
            there.copy_(here)
            here.copy_(there)
            whole = time.perf_counter()
            for source, target in ((here, there), (there, here)):
                for row in range(count):
                    target[row].copy_(source[row])
            end = time.perf_counter()
            if round_ >= 2:
                seconds["ours"].append(after.seconds - before.seconds)
                seconds["floor"].append(whole - begin)
                seconds["alike"].append(end - whole)
        for runner in runners:
            runner.close()
    return {"count": count, "nbytes": nbytes} | seconds
