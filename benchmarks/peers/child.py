"""One peer in a process of its own: opened once, it serves a pass whenever it is told to.

    parent --- "serve" ---> child: at rest -> one pass -> at rest
           <-- {"cpu", "wall", "served", "idle"} ---

What a peer prints goes to the row's log. Between two commands the child waits in a read: `idle` is
the CPU that this cost.
"""

import contextlib
import importlib
import itertools
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.process import start_as_scripts_do
from benchmarks.peers.contract import Batches, Job, Peer, Row
from benchmarks.peers.usage import Meter, peak_memory

SKIPPED = 8
"""Batches at a new pace that do not count: what was prefetched at the pace before it."""

AHEAD = 0.02
"""Of a pass's CPU time, after its last batch: more is work for the next pass."""
GRACE = 5.0
"""Seconds for a peer to clean up behind itself."""


class Host:
    """The commands, one method each; what they return is the reply."""

    def __init__(self, peer: Peer, job: Job, work: Path, spawned: float) -> None:
        self.peer, self.job, self.work, self.spawned = peer, job, work, spawned
        self.meter = Meter()
        self.rested = 0.0
        self.loader: Batches = ()
        self.endless: Iterator[Any] = iter(())

    def prepare(self) -> dict[str, Any]:
        """Once for all runs in this folder: the marker says what it took."""
        marker = self.work / "prepared.json"
        if not marker.exists():
            cpu, wall = self.meter.cpu(), time.monotonic()
            self.peer.prepare(self.job, self.work)
            done = {
                "seconds": time.monotonic() - wall,
                "cpu": self.meter.cpu() - cpu,
                "bytes": sum(f.stat().st_size for f in self.work.rglob("*") if f.is_file()),
            }
            marker.write_text(json.dumps(done))
        return json.loads(marker.read_text())

    def open(self) -> dict[str, Any]:
        """Ends after a first pass: whatever is compiled, cached or started lazily is there."""
        imported, before = time.monotonic(), peak_memory()["own"]
        self.loader = self.peer.open(self.job, self.work)
        opened = time.monotonic()
        batches = iter(self.loader)
        pictures = first_part(next(batches))
        first = time.monotonic()
        looks = np.asarray(pictures, dtype=np.float32)
        spread = float(looks.reshape(len(looks), -1).std(1).min())
        served = len(pictures) + sum(len(first_part(batch)) for batch in batches)
        self.endless = itertools.chain.from_iterable(itertools.repeat(self.loader))
        self.rested, _ = self.meter.rest()
        return {
            "imported": imported - self.spawned, "opened": opened - imported,
            "first_batch": first - opened, "served": served, "memory_before": before,
            "shape": list(looks.shape), "type": str(pictures.dtype).removeprefix("torch."),
            "spread": spread,
        }  # fmt: skip

    def serve(self) -> dict[str, Any]:
        """One pass, from rest to rest: what was done ahead for it is made up for by what it does
        ahead for the next one. For its wall time that is so only if it does."""
        rested = self.rested
        began, started = self.meter.cpu(), time.perf_counter()
        served = sum(len(first_part(batch)) for batch in self.loader)
        ended, last = time.perf_counter(), self.meter.cpu()
        self.rested, busy = self.meter.rest()
        cpu = self.rested - began
        ahead = (self.rested - last) / cpu
        return {
            "cpu": cpu, "wall": (busy if ahead > AHEAD else ended) - started, "served": served,
            "ahead": ahead, "idle": began - rested,
        }  # fmt: skip

    def stall(self, batch_seconds: float, seconds: float) -> dict[str, Any]:
        """Share of the wall time for which a consumer waits that takes so long a whole batch."""
        for batch in itertools.islice(self.endless, SKIPPED):
            time.sleep(batch_seconds * len(first_part(batch)) / self.job.batch)
        started, waited = time.perf_counter(), 0.0
        while time.perf_counter() < started + seconds:
            asked = time.perf_counter()
            batch = next(self.endless)
            waited += time.perf_counter() - asked
            time.sleep(batch_seconds * len(first_part(batch)) / self.job.batch)
        return {"stall": waited / (time.perf_counter() - started)}

    def memory(self) -> dict[str, Any]:
        return peak_memory()


def first_part(batch: Any) -> Any:  # a peer's own kind of batch, and of array
    return batch[0]


def versions(packages: Sequence[str]) -> dict[str, str]:
    installed = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):  # it has two names
            installed[package] = metadata.version(package)
    return installed


def one_thread_each() -> None:
    """The libraries that would start a pool of their own."""
    for name, setter in (("torch", "set_num_threads"), ("cv2", "setNumThreads")):
        try:
            getattr(importlib.import_module(name), setter)(1)
        except ImportError:
            continue  # not this peer's


def make(row: Row, job: Job, work: Path, spawned: float) -> Host:
    one_thread_each()
    module, _, name = row.peer.partition(":")
    peer = getattr(importlib.import_module(f"benchmarks.{module}"), name)(**row.options)
    return Host(peer, job, work / "data", spawned)


def serve(pipe: Any, row: Row, job: Job, work: Path, spawned: float) -> None:
    """Be the process of a row, until the pipe is closed."""
    os.setsid()
    start_as_scripts_do()
    log = os.open(work / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        host = make(row, job, work, spawned)
    except ImportError as error:
        return pipe.send({"missing": str(error)})
    pipe.send({"output": host.peer.output, "versions": versions(row.packages)})
    with contextlib.suppress(EOFError):
        while True:
            command, arguments = pipe.recv()
            try:
                pipe.send(getattr(host, command)(**arguments))
            except Exception as error:
                traceback.print_exc()
                pipe.send({"failed": f"{type(error).__name__}: {error}"})
    # A normal end lets a peer remove its shared memory; one that hangs in it is cut off.
    cut = threading.Timer(GRACE, os._exit, [0])
    cut.daemon = True
    cut.start()
