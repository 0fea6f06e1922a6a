"""Measures a machine's rates in a few seconds, so that a plan can be made before anything ran.

    links    small and large copies, each way and both ways at once; of several devices (links.py)
    device   a matrix product by dtype, a kernel that only moves bytes, one that does nothing
    host     the optimizer's update, by more and more workers at once, as they share the memory

`calibrate(device)` returns the `Costs` for `plan(costs=)`, `take_samples(device)` all the samples
behind them. On a GPU, copies use pinned memory and events on the streams tell the time. On a CPU
("cpu"), the copies are those of a CPU's plan (memmove) and a clock tells the time.

Nothing else should use the machine meanwhile. Callers: trainers before they plan, benchmarks.
"""

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import torch

from offload.caching.machine import machine_of, our_version
from offload.caching.plan_cache import PlanCache
from offload.graph.costs import Costs
from offload.graph.rates import Sample, Samples, costs_of
from offload.graph.topology import Topology
from offload.graph.wiring import with_links
from offload.measuring.links import measure_links
from offload.measuring.stopwatch import Clock, Cpu, Gpu, TimedDevice, run_in_a_row
from offload.memory.device_memory import measuring
from offload.memory.host_memory import memory_left
from offload.torch_seams import fused_adamw_op

MIB = 1 << 20
SMALL = 4096
PARTS = 16
"""The number of measurements that share the seconds."""
LEAST, MOST = 3, 50
"""The least and the most repeats of a measurement."""
ROW = 32
"""How often small things run in a row under one measurement."""
KIND = "rates"
WORKERS = (1, 2, 4, 8, 16, 32, 64)
CPUS = Path("/sys/devices/system/cpu")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of what is measured."""

    link: int = 64 * MIB
    memory: int = 256 * MIB
    gemm: Mapping[str, int] | None = None
    """Rows of a square matrix, by dtype."""
    update: int = 32 * MIB
    """Bytes of a parameter. A set is four such tensors: parameter, gradient and two states."""
    sets: int = 8
    """The least number of sets, which are used in turn."""


CACHES, MOST_BYTES = 16, 4 << 30
"""All sets together take this multiple of the machine's caches, so that a cache holds a 16th of
them; but no more bytes than the latter."""
ON_GPU = Sizes(gemm={"float32": 4096, "tf32": 8192, "bfloat16": 8192})
ON_CPU = Sizes(memory=64 * MIB, gemm={"float32": 768, "bfloat16": 512}, update=16 * MIB, sets=16)


def calibrate(
    device: str | torch.device,
    precision: str = "float32",
    seconds: float = 2.5,
    devices: int = 1,
) -> Costs:
    """The costs of this machine, for `plan(costs=calibrate("cuda"))`.

    `precision` of the program's matrix products: float32, tf32 or bfloat16. `devices`: a plan uses
    so many from this one on, so their links are measured, too, in as many seconds again. On a CPU
    they are parts of its memory."""
    costs = costs_of(take_samples(device, seconds), precision)
    if devices == 1:
        return costs
    with _open_bench(device) as bench:
        repeat = functools.partial(_repeat, clock=time.perf_counter)
        found = measure_links(bench, devices, sizes_on(bench.device).link, seconds, repeat)
    return with_links(costs, found)


def kept_rates(
    cache: PlanCache | None, device: torch.device, precision: str, devices: int = 1
) -> Costs:
    """The rates of this device, or of several from it on, which are measured if the cache has none.

    Rates differ a little whenever they are measured, and a kept plan is known by its rates. So a
    start uses the rates of the first one, on the same device with the same PyTorch."""
    if cache is None:
        return calibrate(device, precision, devices=devices)
    wired = None if devices == 1 else (device.index, devices)
    key = (our_version(), machine_of(device), device.type, precision, wired)
    data = cache.read(KIND, key)
    if data is not None:
        try:
            return _read_costs(data)
        except (TypeError, ValueError) as error:
            cache.refuse(KIND, key, f"{type(error).__name__}: {error}")
    costs = calibrate(device, precision, devices=devices)
    cache.write(KIND, key, asdict(costs))
    return costs


def _read_costs(data: Any) -> Costs:
    kinds = {name: type(rate) for name, rate in asdict(Costs()).items() if name != "topology"}
    if not isinstance(data, dict):
        raise ValueError("these are not the rates of a machine")
    wires = data.pop("topology", None)
    if {name: type(rate) for name, rate in data.items()} != kinds:
        raise ValueError("these are not the rates of a machine")
    if min(data.values()) <= 0:
        raise ValueError("a rate is 0 or less")
    return Costs(**data, topology=None if wires is None else _read_topology(**wires))


def _read_topology(uplinks: Sequence[Sequence[int]], **rates: Any) -> Topology:
    if any(rate is not None and not rate >= 0 for rate in rates.values()):
        raise ValueError("a rate is less than 0")
    return Topology(**rates, uplinks=tuple(tuple(map(int, group)) for group in uplinks))


def take_samples(
    device: str | torch.device,
    seconds: float = 2.5,
    sizes: Sizes | None = None,
    workers: int | None = None,
) -> Samples:
    """Measure this machine in about `seconds`.

    `workers`: the most host workers; by default all CPUs of this process but one, which issues
    kernels."""
    with _open_bench(device) as bench:
        sizes = sizes or sizes_on(bench.device)
        return measure_rates(bench, sizes, seconds, workers or max(1, usable_cpus() - 1))


@contextmanager
def _open_bench(device: str | torch.device) -> Iterator[TimedDevice]:
    target = torch.device(device)
    if target.type not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r} cannot be measured: give cuda or cpu")
    bench: TimedDevice = Gpu(target) if target.type == "cuda" else Cpu()
    try:
        with torch.no_grad(), measuring("its rates", target):
            yield bench
    finally:
        bench.close()


def sizes_on(device: torch.device) -> Sizes:
    """What is measured on this machine."""
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    return beyond_caches(sizes, cache_bytes(), memory_left().nbytes)


def beyond_caches(sizes: Sizes, cache: int, left: int) -> Sizes:
    """The same with more sets, where caches of `cache` bytes would hold much of them. They take a
    quarter of the memory that is `left` at most."""
    wanted = min(CACHES * cache, MOST_BYTES, left // 4)
    return replace(sizes, sets=max(sizes.sets, wanted // (4 * sizes.update)))


def usable_cpus() -> int:
    """The number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_bytes(cpus: Path = CPUS) -> int:
    """Bytes of all last-level caches together, as Linux tells them; 0 if unknown."""
    sizes: dict[tuple[int, str], int] = {}
    for size in cpus.glob("cpu[0-9]*/cache/index[0-9]*/size"):
        level, shared, text = (
            (size.parent / name).read_text(encoding="ascii").strip()
            for name in ("level", "shared_cpu_list", "size")
        )
        sizes[int(level), shared] = int(text.removesuffix("K")) * 1024
    highest = max((level for level, _ in sizes), default=0)
    return sum(nbytes for (level, _), nbytes in sizes.items() if level == highest)


def measure_rates(
    bench: TimedDevice, sizes: Sizes, seconds: float, workers: int, clock: Clock = time.perf_counter
) -> Samples:
    """Take all samples. `clock` ends a measurement after its share, and times the host."""
    repeat = functools.partial(_repeat, share=seconds / PARTS, clock=clock)
    host, there = bench.host_memory(sizes.link), _make_bytes(sizes.link, bench.device)
    host_too, there_too = bench.host_memory(sizes.link), _make_bytes(sizes.link, bench.device)
    into, out = bench.copy(there, host), bench.copy(host_too, there_too)
    both = repeat(lambda: bench.time_at_once([(bench.device, into), (bench.device, out)], 2))
    return Samples(
        gemm={
            name: Sample(2.0 * rows**3, repeat(_product_timer(bench, name, rows)))
            for name, rows in (sizes.gemm or {}).items()
        },
        memory=_measure_memory(bench, sizes.memory, repeat),
        launch=Sample(ROW, repeat(_launch_timer(bench))),
        h2d=_measure_copies(bench, there, host, repeat),
        d2h=_measure_copies(bench, host, there, repeat),
        both=(
            Sample(sizes.link, [to_device for to_device, _ in both]),
            Sample(sizes.link, [to_host for _, to_host in both]),
        ),
        d2d=_measure_copies_on_device(bench, there, there_too, repeat),
        host=_measure_updates(sizes, workers, repeat, clock),
    )


def _repeat(run: Callable[[], T], share: float, clock: Clock) -> list[T]:
    """Repeat for a share of the seconds. The first run fills caches and does not count."""
    run()
    end = clock() + share
    results: list[T] = []
    while len(results) < LEAST or (len(results) < MOST and clock() < end):
        results.append(run())
    return results


Repeat = Callable[[Callable[[], float]], list[float]]


def _make_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8, device=device)


def _product_timer(bench: TimedDevice, name: str, rows: int) -> Callable[[], float]:
    kind = torch.bfloat16 if name == "bfloat16" else torch.float32
    # A GPU draws less power on a matrix of ones, and is faster than on real numbers.
    draws = torch.Generator(bench.device).manual_seed(0)
    a, b, to = (
        torch.randn(rows, rows, dtype=kind, device=bench.device, generator=draws) for _ in range(3)
    )
    product = functools.partial(torch.mm, a, b, out=to)

    def time_product() -> float:
        if bench.device.type != "cuda":
            return bench.time_once(product)
        with _tf32(name == "tf32"):
            return bench.time_once(product)

    return time_product


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32 by the one setting that can always be read and restored: `allow_tf32` raises if
    the user has set others, and would write "ieee" where nothing was set."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _measure_memory(bench: TimedDevice, nbytes: int, repeat: Repeat) -> Sample:
    a, b, to = (torch.ones(nbytes // 4, device=bench.device) for _ in range(3))
    add = functools.partial(torch.add, a, b, out=to)
    return Sample(3.0 * nbytes, repeat(lambda: bench.time_once(add)))


def _launch_timer(bench: TimedDevice) -> Callable[[], float]:
    number = torch.zeros(1, device=bench.device)
    row = functools.partial(run_in_a_row, functools.partial(number.add_, 1), ROW)
    return lambda: bench.time_once(row)


def _measure_copies(
    bench: TimedDevice, to: torch.Tensor, source: torch.Tensor, repeat: Repeat
) -> tuple[Sample, Sample]:
    small = bench.copy(to[:SMALL], source[:SMALL])
    large = bench.copy(to, source)
    row = repeat(lambda: bench.time_once(functools.partial(run_in_a_row, small, ROW)))
    return (
        Sample(SMALL, [took / ROW for took in row]),
        Sample(to.numel(), repeat(lambda: bench.time_once(large))),
    )


def _measure_copies_on_device(
    bench: TimedDevice, to: torch.Tensor, source: torch.Tensor, repeat: Repeat
) -> Sample:
    """Time copies within one device's memory, as a bound for copies to another device.

    They are faster than a link between two devices. The other device is not used: a process that
    uses a device once keeps memory there until it ends, and that device may belong to somebody
    else."""
    copy = functools.partial(to.copy_, source, non_blocking=True)
    return Sample(to.numel(), repeat(lambda: bench.time_once(copy)))


def _measure_updates(sizes: Sizes, workers: int, repeat: Repeat, clock: Clock) -> dict[int, Sample]:
    """Time updates by several workers at once.

    A worker is a thread that calls the kernel, as the threads of an engine do; torch splits each
    call over a team of threads for each worker. Each worker takes the set that was used longest
    ago, because in a real step, too, an update finds nothing in the cache."""
    counts = [count for count in WORKERS if count < workers] + [workers]
    sets = [
        [torch.zeros(sizes.update // 4) for _ in range(4)] for _ in range(max(workers, sizes.sets))
    ]
    turns = itertools.cycle(sets)
    samples: dict[int, Sample] = {}
    with ThreadPoolExecutor(workers, "calibrate-host") as pool:
        for count in counts:
            once = functools.partial(_time_at_once, pool, turns, count, clock)
            samples[count] = Sample(7.0 * sizes.update * count, repeat(once))
    return samples


def _time_at_once(
    pool: ThreadPoolExecutor, turns: Iterator[Sequence[torch.Tensor]], count: int, clock: Clock
) -> float:
    start = Barrier(count + 1)

    def work(tensors: Sequence[torch.Tensor]) -> None:
        start.wait()
        _update(*tensors)

    running = [pool.submit(work, tensors) for tensors in itertools.islice(turns, count)]
    start.wait()
    begin = clock()
    for future in running:
        future.result()
    return clock() - begin


def _update(p: torch.Tensor, g: torch.Tensor, average: torch.Tensor, squares: torch.Tensor) -> None:
    fused_adamw_op(
        [p], [g], [average], [squares], [], [torch.ones(())], lr=0.0, beta1=0.9, beta2=0.999,
        weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False,
    )  # fmt: skip
