"""Part a: what the machine can do at the most. Everything else is measured against it.

links    host <-> device, each way and both at once, pinned, from 64 MiB up
device   matrix products in three precisions, memory, what a launch and an event cost
host     the optimizer's kernel on all cores: 28 bytes a parameter (four read, three written)
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from offloading.report import Report, spread, table

from gpu.part import Found, Job, Outcome, Row, Rows, Step
from gpu.picture import Panel
from gpu.timing import Call, each, often, rounds

NAME = "ceilings"
CLAIM = "What this machine can do: links, matrix products, memory, the optimizer on the host"
LINKS = ("h2d", "d2h", "h2d with d2h", "d2h with h2d", "h2d pageable")
GEMMS = ("gemm fp32", "gemm tf32", "gemm bf16")
DEVICE = (*GEMMS, "memory", "launch", "event record", "event query", "stream wait", "stream switch")
HOST = ("adam, all cores", "adam, 1 core")
MIB = 1 << 20
ADAM_BYTES = 28
"""Of a float32 parameter: itself, gradient and two moments read, all but the gradient written."""
TIMES = 200
UNITS = {"GB/s": 1e-9, "TFLOP/s": 1e-12, "us": 1e6}


def steps(smoke: bool) -> Sequence[Step]:
    if smoke:  # one process: starting one is what takes time
        return [Step("gpu.ceilings:everything", (*LINKS, *DEVICE, *HOST))]
    return [
        Step("gpu.ceilings:links", LINKS, minutes=0.7),
        Step("gpu.ceilings:device", DEVICE, minutes=1),
        Step("gpu.ceilings:host", HOST, minutes=1.5),
    ]


def everything(job: Job) -> Rows:
    for part in (links, device, host):
        yield from part(job)


def links(job: Job) -> Rows:
    sizes = (1,) if job.smoke else (64, 256, 1024)
    for size in sizes:
        both = _copies(size * MIB, job.device)
        seen = rounds({name: call for name, (call, _) in both.items()}, job.device)
        if size == sizes[-1]:
            for name, (_, nbytes) in both.items():
                yield name, _rate([nbytes / s for s in seen[name]], "GB/s", mib=size)


def _copies(nbytes: int, device: str) -> dict[str, tuple[Call, int]]:
    """What copies, and how many bytes one way."""
    pinned = device == "cuda"
    host = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    there = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    come, go = _beside(device), _beside(device)

    def h2d() -> None:
        come(lambda: there[0].copy_(host[0], non_blocking=True))

    def d2h() -> None:
        go(lambda: host[1].copy_(there[1], non_blocking=True))

    def both() -> None:
        h2d()
        d2h()

    return {
        "h2d": (h2d, nbytes), "d2h": (d2h, nbytes),
        "h2d with d2h": (both, nbytes), "d2h with h2d": (both, nbytes),
        "h2d pageable": (lambda: there[0].copy_(pageable), nbytes),
    }  # fmt: skip


def _beside(device: str) -> Callable[[Call], object]:
    """Runs on a stream of its own."""
    if device != "cuda":
        return lambda call: call()
    stream = torch.cuda.Stream()

    def run(call: Call) -> None:
        with torch.cuda.stream(stream):
            call()

    return run


def device(job: Job) -> Rows:
    side = 64 if job.smoke else 8192
    for name in GEMMS:
        yield name, _gemm(name, side, job.device)
    source = torch.ones((1 if job.smoke else 2048) * MIB, dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    seen = rounds({"copy": often(lambda: target.copy_(source), 10)}, job.device)["copy"]
    nbytes = 2 * source.numel()
    yield "memory", _rate([nbytes / s for s in each(seen, 10)], "GB/s", nbytes=nbytes)
    one = torch.zeros(1, device=job.device)
    calls = {"launch": lambda: one.add_(1), **_stream_calls(job.device)}
    seen = rounds({name: often(call, TIMES) for name, call in calls.items()}, job.device)
    for name in calls:
        yield name, _rate(each(seen[name], TIMES), "us")


def _gemm(name: str, side: int, device: str) -> Row:
    kind = torch.bfloat16 if name.endswith("bf16") else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = name.endswith("tf32")
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    times = 2 if name.endswith("fp32") else 10
    seen = rounds({"gemm": often(lambda: a @ b, times)}, device)["gemm"]
    return _rate([2 * side**3 / s for s in each(seen, times)], "TFLOP/s", side=side)


def _stream_calls(device: str) -> dict[str, Call]:
    """Of the host's time. On the CPU there are none: calls of as many Python objects."""
    if device != "cuda":
        return dict.fromkeys(DEVICE[-4:], lambda: None)
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()

    def switch() -> None:
        with torch.cuda.stream(stream):
            pass

    return {
        "event record": event.record, "event query": event.query,
        "stream wait": lambda: stream.wait_event(event), "stream switch": switch,
    }  # fmt: skip


def host(job: Job) -> Rows:
    count = 100_000 if job.smoke else 250_000_000
    parameter = torch.nn.Parameter(torch.ones(count))
    parameter.grad = torch.ones(count)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    threads = torch.get_num_threads()
    for name in HOST:
        torch.set_num_threads(1 if name.endswith("1 core") else threads)
        seen = rounds({"adam": optimizer.step}, "cpu")["adam"]
        rates = [ADAM_BYTES * count / s for s in seen]
        yield name, _rate(rates, "GB/s", threads=torch.get_num_threads())


def _rate(values: list[float], unit: str, **more: int) -> Row:
    scaled = [value * UNITS[unit] for value in values]
    return {"median": statistics.median(scaled), "values": scaled, "unit": unit, **more}


def report(found: Found) -> Outcome:
    said = Report(NAME, CLAIM, {"repeats": 5, "warm-up": 3})
    order = [cell for cell in (*LINKS, *DEVICE, *HOST) if cell in found.rows]
    rows = [[c, spread(found.rows[c]["values"]), found.rows[c]["unit"]] for c in order]
    said.tables["Ceilings"] = table(["what", "median [least, most]", "unit"], rows)
    said.remarks = [
        "with: the other direction runs at the same time, and both are timed to the later end.",
        "launch, event, stream: of the host's time a call, 200 in a row.",
    ]
    rates = {c: found.rows[c]["median"] for c in order if found.rows[c]["unit"] == "GB/s"}
    return Outcome(said, [Panel("Bytes", "GB/s", rates)])
