"""Where a step's time goes on a device: every kernel of eager beside those of ours, by name.

    python -m gpu.kernels [--depth 12] [--budget none]      GPT-2 XL, of so many layers

from benchmarks/, with the project's root and benchmarks/ in PYTHONPATH. On a CPU a tiny one, to see
that it works. Rows are sorted by how far eager and ours are apart.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from offloading.report import table
from torch.profiler import ProfilerActivity, profile

from gpu.models import GPT2_XL, TINY, Kind, language
from gpu.ours import ENGINES, captured, eager, planned_to, run_by
from gpu.timing import REPEATS, WARM_UP, rounds

STEPS = 2
ROWS = 30
LONGEST = 110
"""Characters of a kernel's name."""


@dataclass(slots=True)
class Kernels:
    """Of one step, by name."""

    calls: Counter[str] = field(default_factory=Counter)
    ms: Counter[str] = field(default_factory=Counter)


def kernels(call: Callable[[], object], device: str) -> Kernels:
    for _ in range(WARM_UP):
        call()
    on = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[on]) as watched:
        for _ in range(STEPS):
            call()
    found = Kernels()
    for event in watched.key_averages():
        took = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        found.calls[event.key] += event.count // STEPS
        found.ms[event.key] += took / STEPS / 1e3
    return found


def compared(device: str, depth: int, budget: str) -> str:
    """A table for people."""
    size = replace(GPT2_XL, depth=depth) if device == "cuda" else TINY
    case = language(Kind(size, "gpt2"))
    torch.manual_seed(0)
    batch = case.batch(device)
    module, host = case.build(device), case.build("cpu")
    made = planned_to(captured(case, host, case.optimizer(host), batch, device), budget)
    calls: dict[str, Callable[[], object]] = {
        "eager": partial(eager(case, module, case.optimizer(module)), *batch)
    }
    found, seconds = {"eager": kernels(calls["eager"], device)}, {}
    for engine in ENGINES:
        with run_by(engine, made) as runner:
            calls = {"eager": calls["eager"], engine: partial(runner, *batch)}
            seen = rounds(calls, device, REPEATS)
            seconds |= {name: statistics.median(took) for name, took in seen.items()}
            found[engine] = kernels(calls[engine], device)
    return f"{case.setting}, budget {budget}\n\n{_summary(found, seconds)}\n\n{_rows(found)}"


def _summary(found: dict[str, Kernels], seconds: dict[str, float]) -> str:
    lines = [
        [way, f"{1e3 * seconds[way]:.2f}", f"{sum(one.ms.values()):.2f}"]
        for way, one in found.items()
    ]
    return table(["way", "ms a step", "ms of kernels"], lines)


def _rows(found: dict[str, Kernels]) -> str:
    first, *others = found.values()

    def apart(name: str) -> float:
        return max(abs(one.ms[name] - first.ms[name]) for one in others)

    names = sorted({n for one in found.values() for n in one.ms}, key=apart, reverse=True)
    lines = [
        [
            name[:LONGEST].replace("|", "/"),
            *(f"{one.calls[name]} in {one.ms[name]:.3f}" for one in found.values()),
        ]
        for name in names[:ROWS]
    ]
    return table(["kernel", *(f"{way}: calls in ms" for way in found)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu.kernels", description=__doc__)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--budget", default="none")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(compared(device, args.depth, args.budget))


if __name__ == "__main__":
    main()
