"""Members of a group as real processes on this machine, for the tests of reducing."""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

if multiprocessing.parent_process() is not None:
    # A member needs none of the strategies that `trainers` offers, and they take seconds to load.
    bare = sys.modules.setdefault("trainers", ModuleType("trainers"))
    bare.__path__ = [str(Path(__file__).parents[2] / "trainers")]

from trainers.elastic.reducing import Graveyard, GroupPlace, form_group

HOST = "127.0.0.1"
TRANSFER = 3.0
"""So long a piece of a reduce may be under way between members, in seconds."""


class Files:
    """A rendezvous of files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        path = self._folder / key.replace("/", "_")
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(value)
        fresh.rename(path)

    def get(self, key: str, timeout: float) -> bytes:
        path = self._folder / key.replace("/", "_")
        end = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(key)
            time.sleep(0.001)
        return path.read_bytes()


def always() -> None:
    """The generation goes on."""


class Ended(Exception):
    """The generation has ended."""


class Deadline:
    """An `alive` that raises once its time is over, and notes when it did."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.raised = 0.0

    def __call__(self) -> None:
        if time.monotonic() > self._end:
            self.raised = time.monotonic()
            raise Ended


def tasks() -> set[str]:
    """The numbers of this process's threads, those of C++ too."""
    return {*os.listdir("/proc/self/task")}


def left_over(before: set[str]) -> list[str]:
    """The names of threads that are not gone within 5 s. A joined one takes a moment to end."""
    end = time.monotonic() + 5
    while (more := tasks() - before) and time.monotonic() < end:
        os.sched_yield()
    return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in more]


Job = Callable[..., Any]


def _member(
    job: Job, rank: int, size: int, folder: Path, pipe: Connection, options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    before = tasks()
    graveyard = Graveyard()
    try:
        place = GroupPlace(1, rank, size, HOST)
        group = form_group(Files(folder), place, 60.0, always, graveyard, TRANSFER)
        answer = job(group, pipe, **options)
        group.abandon(graveyard)
        del group
        graveyard.close()
        pipe.send(("done", answer, left_over(before)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc(), []))
        graveyard.close()


class Members:
    """`size` processes that run `job(group, pipe, **options)`; they end with the block."""

    def __init__(self, job: Job, size: int, folder: Path, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_member, args=(job, rank, size, folder, theirs, options)
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Members":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def heard(self, rank: int) -> Any:
        """What a member says next, before it is done."""
        assert self.pipes[rank].poll(120), f"rank {rank} says nothing"
        said = self.pipes[rank].recv()
        if isinstance(said, tuple) and said[0] == "failed":
            raise AssertionError(f"rank {rank}: {said[1]}")
        return said

    def answer(self, rank: int) -> Any:
        """What the job of a member returned; it left no thread behind and its process ends."""
        kind, value, threads = self.heard(rank)
        assert (kind, threads) == ("done", [])
        self.processes[rank].join(30)
        assert self.processes[rank].exitcode == 0
        return value

    def answers(self) -> list[Any]:
        return [self.answer(rank) for rank in range(len(self.pipes))]


__all__ = ["HOST", "Deadline", "Ended", "Files", "Members", "always", "left_over", "tasks"]
