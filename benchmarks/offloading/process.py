"""A process of its own for what must not be disturbed by what ran before, and how it is measured.

Memory is the peak resident set since `forget_peak()`. (`ru_maxrss` would begin with that of the
process that started this one.)
"""

import multiprocessing
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

PROC = Path("/proc/self")


def in_a_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns. An exception of it is raised here."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """CPU seconds of the whole process, wall seconds, and what it returned."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = function()
    return time.process_time() - cpu, time.perf_counter() - wall, result


def forget_peak() -> None:
    if PROC.exists():
        (PROC / "clear_refs").write_text("5")


def memory_mib(peak: bool = True) -> float:
    """The most since `forget_peak()`, or now. Zero where the system does not tell."""
    if not PROC.exists():
        return 0.0
    status = (PROC / "status").read_text()
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024
