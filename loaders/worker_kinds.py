"""The workers that a user's options ask for: processes, or threads that a sample may not hold up.

worker_kind="process"                 a `WorkerProcess` each
worker_kind="thread", timeout=...     a `ReadingThread` each
worker_kind="thread"                  nobody: the thread that needs a sample reads it
"""

from typing import Any

from loaders.options import WorkerOptions
from loaders.workers.processes import WorkerProcess
from loaders.workers.reading_thread import ReadingThread
from loaders.workers.worker import WorkerPlace


def worker_process(dataset: Any, options: WorkerOptions, seed: int, number: int) -> WorkerProcess:
    """Worker number `number`, whose process starts with its first read."""
    place = WorkerPlace(number, options.count, seed, options.init)
    name = f"perfect-worker-{number}"
    return WorkerProcess(dataset, options.start_method, name, options.timeout, place)


def reading_thread(dataset: Any, timeout: float, number: int) -> ReadingThread:
    return ReadingThread(dataset, timeout, f"perfect-read-{number}")
