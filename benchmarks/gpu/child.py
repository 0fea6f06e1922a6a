"""A step in a process of its own: memory, a crash and a poisoned device stay in it.

    launch(job) --JSON--> python -m gpu.child --rows--> OUT/gpu_PART.jsonl, line by line

The child writes each row down itself, so that what was measured outlives it. What it says goes to
a log beside the rows; of a child that failed its last words are the problem.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.part import Job, Rows
from benchmarks.gpu.store import Store
from offload.measuring import calibration

LAST_WORDS = 1200
"""Characters of the log that a problem quotes."""


def launch(
    job: Job, store: Store, seconds: float, environment: Mapping[str, str]
) -> tuple[str, bool]:
    """Why it did not come to its end (empty: it did), and whether it was ended, after `seconds`."""
    log = store.path.with_suffix(".log")
    handed = json.dumps({"job": asdict(job), "store": [str(store.path.parent), store.path.stem]})
    with log.open("w", encoding="utf-8") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", store.device],
            stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        try:
            child.communicate(handed, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it took longer than the {seconds:.0f} s that were left", True
        finally:
            # Ctrl-C and a timeout leave no process with a model on the GPU.
            if child.poll() is None:
                child.kill()
                child.wait()
    if child.returncode == 0:
        return "", False
    return f"{_ending(child.returncode)}{_last_words(log)}", False


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed, as the system does when memory runs out. "
    if code < 0:
        return f"ended by {signal.Signals(-code).name}. "
    return ""


def _last_words(log: Path) -> str:
    """Of an exception: what it says, and where. Else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("File ")]
    return " / ".join([*lines[-1:], *where[-1:]])[-LAST_WORDS:]


def function_of(run: str) -> Callable[[Job], Rows]:
    module, _, name = run.partition(":")
    return getattr(importlib.import_module(f"benchmarks.{module}"), name)


def main() -> None:
    given = json.loads(sys.stdin.read())
    job = Job(**{**given["job"], "cells": tuple(given["job"]["cells"])})
    if job.smoke:
        # The products that measure a GPU take ten minutes on a fake one.
        calibration.ON_GPU = calibration.ON_CPU
    folder, stem = given["store"]
    store = Store(Path(folder), stem, sys.argv[1])
    begin = time.perf_counter()
    for cell, row in function_of(job.run)(job):
        if cell not in job.cells:
            continue  # it is there already
        problem = row.pop("problem", "")
        store.add(cell, None if problem else row, problem, time.perf_counter() - begin)
        begin = time.perf_counter()


if __name__ == "__main__":
    main()
