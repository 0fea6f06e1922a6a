"""Who reads samples: which kind of worker a data set gets, and how one is made.

worker_kind="process"                 a `WorkerProcess` each
worker_kind="thread", timeout=...     a `ReadingThread` each
worker_kind="thread"                  nobody: the thread that needs a sample reads it
workers=0                             nobody: the loop's own thread reads, and nothing ahead
worker_kind="auto"                    threads, if the data set is known to be safe in them; else
                                      processes; else, where it cannot be sent there, one thread
"""

from dataclasses import replace
from typing import Any

from loaders.adopting.thread_safety import safe_in_threads, why_not_sendable
from loaders.options import WorkerOptions
from loaders.streams.streamed_samples import StreamedSamples
from loaders.workers.processes import WorkerProcess, default_start_method
from loaders.workers.reading_thread import ReadingThread
from loaders.workers.worker import WorkerPlace


def settled_kind(options: WorkerOptions, dataset: Any) -> WorkerOptions:
    """The options with a kind of worker that suits the data set, and why it was chosen."""
    if options.kind != "auto":
        return options
    if isinstance(dataset, StreamedSamples) or options.count == 0:
        return replace(options, kind="thread")
    kind = type(dataset).__name__
    if options.init is not None:
        return replace(options, kind="process", because="worker_init_fn is for them")
    if options.start_method is not None:
        return replace(options, kind="process", because="start_method is for them")
    if safe_in_threads(dataset):
        return replace(options, kind="thread", because=f"{kind} is known to be safe in them")
    if default_start_method() != "fork" and (why := why_not_sendable(dataset)):
        because = f"{kind} cannot be sent to a process ({why}), nor is it known to be safe in more"
        return replace(options, kind="thread", count=1, because=because)
    because = f'{kind} is not known to be safe in threads; worker_kind="thread" if it is'
    return replace(options, kind="process", because=because)


def worker_process(dataset: Any, options: WorkerOptions, seed: int, number: int) -> WorkerProcess:
    """Worker number `number`, whose process starts with its first read."""
    place = WorkerPlace(number, options.count, seed, options.init)
    name = f"perfect-worker-{number}"
    return WorkerProcess(dataset, options.start_method, name, options.timeout, place)


def reading_thread(dataset: Any, timeout: float, number: int) -> ReadingThread:
    return ReadingThread(dataset, timeout, f"perfect-read-{number}")
