"""Part a: what the machine can do at the most. Everything else is measured against it.

rates   links each way and both at once, matrix products, memory, launches, the optimizer on the
        host by more and more workers: what offload/measuring/calibration.py measures for a plan
calls   of the host: an event, a stream; pageable memory; torch's own optimizer on all cores
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from benchmarks.gpu.part import Found, Job, Row, Rows, Step
from benchmarks.gpu.timing import Call, each, often, rounds
from benchmarks.harness.report import Report, Target, format_spread, format_table
from offload.graph.rates import Sample, costs_of
from offload.measuring.calibration import Sizes, measure_rates, sizes_on
from offload.measuring.stopwatch import Cpu, Gpu, TimedDevice
from offload.memory.cuda_shim import why_not_on

NAME = "ceilings"
CLAIM = "What this machine can do: links, matrix products, memory, the optimizer on the host"
RATES = (
    "h2d", "d2h", "h2d while d2h", "d2h while h2d", "h2d of 4 KiB", "d2h of 4 KiB", "within",
    "gemm float32", "gemm tf32", "gemm bfloat16", "memory", "launch", "host, 1 worker",
    "host, all workers", "costs",
)  # fmt: skip
CALLS = ("event record", "event query", "stream wait", "stream switch")
OTHERS = (*CALLS, "h2d pageable", "adam in one call", "shim")
MIB = 1 << 20
ADAM_BYTES = 28
"""Of a float32 parameter: itself, gradient and two moments read, all but the gradient written."""
TIMES = 200
UNITS = {"GB/s": 1e-9, "TFLOP/s": 1e-12, "us": 1e6}
SECONDS = 25.0
"""Of measuring the rates."""


def steps(smoke: bool) -> Sequence[Step]:
    if smoke:  # one process: starting one is what takes time
        cells = [cell for cell in (*RATES, *OTHERS) if cell != "gemm tf32"]
        return [Step("gpu.ceilings:everything", tuple(cells))]
    return [
        Step("gpu.ceilings:rates", RATES, minutes=1.5),
        Step("gpu.ceilings:others", OTHERS, minutes=1.5),
    ]


def everything(job: Job) -> Rows:
    yield from rates(job)
    yield from others(job)


def rates(job: Job) -> Rows:
    bench: TimedDevice = Gpu(torch.device("cuda")) if job.device == "cuda" else Cpu()
    sizes = sizes_on(torch.device(job.device))
    if job.smoke:
        sizes = Sizes(link=MIB, memory=MIB, gemm={"float32": 64, "bfloat16": 64}, update=MIB)
    workers = len(os.sched_getaffinity(0))
    with torch.no_grad():
        samples = measure_rates(bench, sizes, 0.5 if job.smoke else SECONDS, workers)
    bench.close()
    (h2d_small, h2d), (d2h_small, d2h) = samples.h2d, samples.d2h
    into, out = samples.both
    found = {
        "h2d": (h2d, "GB/s"), "d2h": (d2h, "GB/s"),
        "h2d while d2h": (into, "GB/s"), "d2h while h2d": (out, "GB/s"),
        "h2d of 4 KiB": (Sample(1, h2d_small.seconds), "us"),
        "d2h of 4 KiB": (Sample(1, d2h_small.seconds), "us"),
        "within": (samples.d2d, "GB/s"), "memory": (samples.memory, "GB/s"),
        "launch": (Sample(1, [s / samples.launch.amount for s in samples.launch.seconds]), "us"),
        "host, 1 worker": (samples.host[1], "GB/s"),
        "host, all workers": (samples.host[max(samples.host)], "GB/s"),
        **{f"gemm {name}": (sample, "TFLOP/s") for name, sample in samples.gemm.items()},
    }  # fmt: skip
    for cell, (sample, unit) in found.items():
        values = sample.seconds if unit == "us" else [sample.amount / s for s in sample.seconds]
        yield cell, _scaled(values, unit)
    yield "costs", {"costs": asdict(costs_of(samples)), "unit": ""}


def others(job: Job) -> Rows:
    calls = _stream_calls(job.device)
    seen = rounds({name: often(call, TIMES) for name, call in calls.items()}, job.device)
    for name in CALLS:
        yield name, _scaled(each(seen[name], TIMES), "us")
    source = torch.ones((1 if job.smoke else 256) * MIB, dtype=torch.uint8)
    target = torch.empty_like(source, device=job.device)
    took = rounds({"copy": lambda: target.copy_(source)}, job.device)["copy"]
    yield "h2d pageable", _scaled([source.numel() / s for s in took], "GB/s")
    yield "adam in one call", _adam(100_000 if job.smoke else 250_000_000)
    yield "shim", _shim(job.device)


def _stream_calls(device: str) -> dict[str, Call]:
    """Seconds of the host. A CPU has none of these: calls of nothing."""
    if device != "cuda":
        return dict.fromkeys(CALLS, lambda: None)
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()

    def switch() -> None:
        with torch.cuda.stream(stream):
            pass

    return {
        "event record": event.record, "event query": event.query,
        "stream wait": lambda: stream.wait_event(event), "stream switch": switch,
    }  # fmt: skip


def _adam(count: int) -> Row:
    """As whoever offloads the optimizer's state calls it: torch's threads share the work."""
    parameter = torch.nn.Parameter(torch.ones(count))
    parameter.grad = torch.ones(count)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    took = rounds({"adam": optimizer.step}, "cpu")["adam"]
    row = _scaled([ADAM_BYTES * count / s for s in took], "GB/s")
    return row | {"threads": torch.get_num_threads()}


def _shim(device: str) -> Row:
    """Built here, at the first call, so that no other part waits for the compiler."""
    begin = time.perf_counter()
    why_not = why_not_on(torch.device(device))
    return {"why_not": why_not, "build_s": time.perf_counter() - begin, "unit": ""}


def _scaled(values: Sequence[float], unit: str) -> Row:
    scaled = [value * UNITS[unit] for value in values]
    return {"median": statistics.median(scaled), "values": scaled, "unit": unit}


def report(found: Found) -> Report:
    said = Report(NAME, CLAIM, {"warm-up": "1 to 3", "repeats": "3 to 50"})
    order = [cell for cell in (*RATES, *OTHERS) if "values" in found.rows.get(cell, {})]
    rows = [[c, format_spread(found.rows[c]["values"]), found.rows[c]["unit"]] for c in order]
    said.tables["Ceilings"] = format_table(["what", "median [least, most]", "unit"], rows)
    said.remarks = [
        "while: both directions copy at once, timed by events on their streams.",
        "host: the fused AdamW kernel, 28 bytes a parameter, a tensor a worker; in one call: one"
        " tensor, torch's own threads.",
        "event, stream: of the host's time a call, 200 in a row.",
        f"allocator shim: {found.rows.get('shim', {}).get('why_not') or 'built, or not yet tried'}",
    ]
    said.asked = [_enough(found), _placed(found)]
    return said


def _enough(found: Found) -> Target:
    """At least five of each: what everything else is divided by should be no accident."""
    few = [c for c, row in found.rows.items() if len(row.get("values", range(5))) < 5]
    return Target("ceilings measured fewer than five times", 0, len(few))


def _placed(found: Found) -> Target:
    """Without it every other part runs, and measures copies that nobody needs."""
    row = found.rows.get("shim")
    lacks = None if row is None else float(bool(row["why_not"]))
    return Target("the allocator shim cannot be built here", 0, lacks)
