"""A fresh process for what must not be disturbed by what ran before; the memory of a call.

Memory is the peak resident set since `reset_peak_memory()`. (`ru_maxrss` would begin with that of
the process that started this one.)
"""

import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

PROC = Path("/proc/self")


def run_in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns there. Its exception is raised here."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=start_as_scripts_do) as pool:
        return pool.submit(function, *arguments).result()


def start_as_scripts_do() -> None:
    """Let this process start others as a script does: a spawned one spawns its loader's, too."""
    multiprocessing.set_start_method(None, force=True)  # pyright: ignore[reportArgumentType]


def reset_peak_memory() -> None:
    if PROC.exists():
        (PROC / "clear_refs").write_text("5")


def read_memory_mib(peak: bool = True) -> float:
    """The most since `reset_peak_memory()`, or what is resident now. Zero without /proc."""
    if not PROC.exists():
        return 0.0
    status = (PROC / "status").read_text()
    match = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024
