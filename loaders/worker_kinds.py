"""Who reads samples: which kind of worker a data set gets, and how one is made.

kind="process"                 a `WorkerProcess` each
kind="thread", timeout=...     a `ReadingThread` each
kind="thread"                  nobody: the thread that needs a sample reads it
workers=0                      nobody: the loop's own thread reads, and nothing ahead
kind="auto"                    threads, if the data set is known to be safe in them; else processes;
                               else, where it cannot be sent there, one thread
"""

from dataclasses import dataclass
from typing import Any

from loaders.adopting.thread_safety import safe_in_threads, why_not_sendable
from loaders.options import WorkerKind, Workers
from loaders.streams.streamed_samples import StreamedSamples
from loaders.workers.cpus import usable_cpus
from loaders.workers.processes import WorkerProcess, default_start_method
from loaders.workers.reading_thread import ReadingThread
from loaders.workers.worker import WorkerPlace


@dataclass(frozen=True, slots=True)
class SettledWorkers:
    """What became of the `Workers` that were asked for."""

    asked: Workers
    count: int
    kind: WorkerKind
    because: str = ""
    """Why they are of this kind, where the loader chose it."""


def settled(asked: Workers, dataset: Any) -> SettledWorkers:
    """As many workers as were asked for, of a kind that suits the data set."""
    count = usable_cpus() if asked.count == "auto" else asked.count
    if asked.kind != "auto":
        return SettledWorkers(asked, count, asked.kind)
    if isinstance(dataset, StreamedSamples) or count == 0:
        return SettledWorkers(asked, count, "thread")
    kind = type(dataset).__name__
    for name in ("init", "start_method"):
        if getattr(asked, name) is not None:
            return SettledWorkers(asked, count, "process", f"{name} is for them")
    if safe_in_threads(dataset):
        return SettledWorkers(asked, count, "thread", f"{kind} is known to be safe in them")
    if default_start_method() != "fork" and (why := why_not_sendable(dataset)):
        because = f"{kind} cannot be sent to a process ({why}), nor is it known to be safe in more"
        return SettledWorkers(asked, 1, "thread", because)
    because = f'{kind} is not known to be safe in threads; Workers(kind="thread") if it is'
    return SettledWorkers(asked, count, "process", because)


def worker_process(dataset: Any, workers: SettledWorkers, seed: int, number: int) -> WorkerProcess:
    """Worker number `number`, whose process starts with its first read."""
    asked = workers.asked
    place = WorkerPlace(number, workers.count, seed, asked.init, asked.timeout is not None)
    name = f"perfect-worker-{number}"
    return WorkerProcess(dataset, asked.start_method, name, asked.timeout, place)


def reading_thread(dataset: Any, timeout: float, number: int) -> ReadingThread:
    return ReadingThread(dataset, timeout, f"perfect-read-{number}")
