"""The private names of torch that the loaders use. Seen in torch 2.11 and in 2.15.

Where one is gone, importing this file raises an ImportError that names it.
"""

import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader

try:
    from torch.utils.data._utils import signal_handling as _signals
    from torch.utils.data._utils import worker as _worker

    plain_results = torch._C._disabled_torch_function_impl
    _forget_workers = _signals._remove_worker_pids  # pyright: ignore[reportPrivateImportUsage]
    _info, _kind = _worker._worker_info, _worker.WorkerInfo  # None in this process; it is there
except (AttributeError, ImportError) as error:
    raise ImportError(
        f"torch {torch.__version__}: {error}. loaders needs it (loaders/torch_seams.py) and was"
        " tested with torch>=2.11,<2.16: install such a version"
    ) from error


def version_of(tensor: torch.Tensor) -> int:
    return tensor._version


def set_worker_info(number: int, workers: int, seed: int, dataset: Any) -> None:
    """Let this process be worker `number` of `workers` for code that asks torch."""
    _worker._worker_info = _kind(id=number, num_workers=workers, seed=seed, dataset=dataset)


def take_over_workers(batches: Any) -> Any:
    """`batches`, whose workers torch then leaves to us in two ways.

    Where a worker dies, torch raises an error in the main thread wherever that happens to be. It is
    raised only where the next one of `batches` is waited for.

    Where the garbage collector finds `batches` in a cycle, it ends the threads of their queues
    first, and torch then waits five seconds for each worker that it can no longer tell to end. The
    queues outlive `batches`, so that each worker gets the message, and ends.
    """
    if getattr(batches, "_worker_pids_set", False):
        _forget_workers(id(batches))
        batches._worker_pids_set = False
        weakref.finalize(batches, lambda _: None, batches._index_queues).atexit = False
    return batches


def end_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes of a DataLoader now, and not when its last batches are collected."""
    if (end := getattr(loader._iterator, "_shutdown_workers", None)) is not None:
        end()
