# pyright: reportMissingImports=false
"""TensorSocket: one process loads, and each consumer is a process that gets batches by sockets.

    producer   ReuseLoader -> TensorProducer --- pickled batches, localhost ---> 3 TensorConsumers

Version 0.0.5 sends `producer_batch_size` batches together, fails if that is 1, sends no batch that
is smaller than the others, and never sends the last ones of a pass. So its loader serves all passes
as one, drops what is left of each pass, and adds a batch that is not sent. On a GPU only handles
would go through the sockets, which is what it was made for.

It is in the extra `bench`. Without it there is no row.
"""

import hashlib
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty
from time import perf_counter, process_time
from typing import Any

from loaders import ReuseLoader

TOGETHER = 2
LONGEST = 120.0
"""Seconds until it is given up."""


class PassesInOne:
    """All passes of a loader as one, and a batch more. They must have an even number of batches."""

    def __init__(self, loader: ReuseLoader, passes: int) -> None:
        self._loader, self._passes = loader, passes

    def __len__(self) -> int:
        return self._passes * len(self._loader) + 1

    def __iter__(self) -> Iterator[Any]:
        batch = None
        for _ in range(self._passes):
            for batch in self._loader:
                yield batch
        yield batch


def produce(ports: list[int], consumers: int, loader: PassesInOne, go: Any, found: Any) -> None:
    """Run in a process."""
    from tensorsocket import TensorProducer

    producer = TensorProducer(
        loader, ports[0], ports[1], (ports[2], ports[3]), producer_batch_size=TOGETHER
    )
    while len(producer.hb.consumers) < consumers:
        time.sleep(0.01)
    go.set()
    begun, cpu = perf_counter(), process_time()
    for _ in producer:
        pass
    found.put(("producer", "", begun, perf_counter(), process_time() - cpu))
    time.sleep(1)  # what was sent last is still on its way
    os._exit(0)  # its threads wait for ever


def consume(ports: list[int], batch_size: int, go: Any, found: Any) -> None:
    """Run in a process."""
    from tensorsocket import TensorConsumer

    batches = TensorConsumer(ports[0], ports[1], (ports[2], ports[3]), batch_size=batch_size)
    go.wait()
    cpu, digest = process_time(), hashlib.blake2b()
    for batch, labels in batches:
        digest.update(batch[:, :1, :1, :1].contiguous().numpy())
        digest.update(labels.numpy())
    found.put(("consumer", digest.hexdigest(), 0.0, perf_counter(), process_time() - cpu))
    found.close()
    found.join_thread()
    os._exit(0)


def tensorsocket(
    folder: Path, options: dict[str, Any], passes: int, consumers: int, workers: int
) -> dict[str, Any]:
    """Return what the consumers got, and the seconds of all processes from the moment when all are
    there."""
    spawn = multiprocessing.get_context("spawn")
    go, found, ports = spawn.Event(), spawn.Queue(), free_ports(4)
    loader = ReuseLoader(str(folder), workers=workers, drop_last=True, **options)
    given = (ports, consumers, PassesInOne(loader, passes), go, found)
    processes = [spawn.Process(target=produce, args=given, daemon=True)]
    for _ in range(consumers):
        given = (ports, options["batch_size"], go, found)
        processes.append(spawn.Process(target=consume, args=given, daemon=True))
    for process in processes:
        process.start()
    try:
        rows = results(found, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    begun = max(row[2] for row in rows)
    return {
        "wall": max(row[3] for row in rows) - begun,
        "cpu": sum(row[4] for row in rows),
        "digests": [row[1] for row in rows if row[0] == "consumer"],
    }


def results(found: Any, processes: list[Any]) -> list[Any]:
    """Return what each process has to say. Raise if one has ended without a word."""
    rows: list[Any] = []
    until = perf_counter() + LONGEST
    while len(rows) < len(processes):
        if any(process.exitcode for process in processes) or perf_counter() > until:
            raise AssertionError("TensorSocket has failed, or takes too long: see what it printed")
        with suppress(Empty):
            rows.append(found.get(timeout=1))
    return rows


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    with ExitStack() as open_ones:
        found = []
        for _ in range(count):
            one = open_ones.enter_context(socket.socket())
            one.bind(("", 0))
            found.append(one.getsockname()[1])
        return found
