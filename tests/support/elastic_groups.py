"""Members of a group as real processes on this machine, for the tests of reducing."""

import os
import pickle
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.swarms.swarm import Nursery, Process, until
from trainers.elastic.reducing.graveyard import Graveyard
from trainers.elastic.reducing.group import GroupPlace, form_group

HOST = "127.0.0.1"
TRANSFER = 3.0
"""So long a piece of a reduce may be under way between members, in seconds."""
FOR_EVER = 1000.0
"""Seconds that no test waits: what ends before has ended for another reason."""


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
    """An `alive` that raises once its time is over, or a file is there."""

    def __init__(self, seconds: float, word: Path | None = None) -> None:
        """`word`: whoever makes this file says that the generation has ended."""
        self._end = time.monotonic() + seconds
        self._word = word

    def __call__(self) -> None:
        if time.monotonic() > self._end or (self._word and self._word.exists()):
            raise Ended


def tasks() -> set[str]:
    """The numbers of this process's threads, those of C++ too."""
    return {*os.listdir("/proc/self/task")}


def left_over(before: set[str]) -> list[str]:
    """The names of threads that stay for a minute. A joined one takes a moment to end."""
    end = time.monotonic() + 60
    while (more := tasks() - before) and time.monotonic() < end:
        os.sched_yield()
    return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in more]


class Told:
    """What a member says, as files of a folder, in turn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def _next(self) -> Path:
        self._count += 1
        return self._folder / f"told {self._count}"

    def send(self, what: Any) -> None:
        path = self._next()
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(what))
        part.rename(path)

    def receive(self, seconds: float, more: Callable[[], str]) -> Any:
        path = self._next()
        until(path.exists, f"{path.name} of {self._folder.name}", seconds, more)
        return pickle.loads(path.read_bytes())


Job = Callable[..., Any]


def member(settings: dict[str, Any]) -> None:
    """Be a member, in a process that a nursery has forked, and which is not pytest's."""
    os.environ.update(settings["environment"])
    job: Job = getattr(import_module(settings["module"]), settings["job"])
    told = Told(Path(settings["out"]))
    torch.set_num_threads(1)
    before = tasks()
    graveyard = Graveyard()
    try:
        place = GroupPlace(1, settings["rank"], settings["size"], HOST)
        files = Files(Path(settings["folder"]))
        group = form_group(files, place, 60.0, always, graveyard, settings["transfer"])
        answer = job(group, told, **settings["options"])
        group.abandon(graveyard)
        del group
        graveyard.close()
        told.send(("done", answer, left_over(before)))
    except BaseException:
        told.send(("failed", traceback.format_exc(), []))
        graveyard.close()


class Members:
    """`size` processes that run `job(group, told, **options)`; they end with the block."""

    def __init__(
        self,
        nursery: Nursery,
        job: Job,
        size: int,
        folder: Path,
        environment: dict[str, str] | None = None,
        transfer: float = TRANSFER,
        **options: Any,
    ) -> None:
        usual = {
            "program": "call",
            "function": "support.elastic_groups:member",
            "module": job.__module__,
            "job": job.__name__,
            "size": size,
            "folder": str(folder),
            "environment": environment or {},
            "transfer": transfer,
            "options": options,
        }
        self.processes: list[Process] = []
        self.told: list[Told] = []
        for rank in range(size):
            out = folder / f"member {rank}"
            self.processes.append(Process(nursery, {**usual, "rank": rank, "out": str(out)}))
            self.told.append(Told(out))

    def __enter__(self) -> "Members":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def heard(self, rank: int) -> Any:
        """What a member says next, before it is done."""
        said = self.told[rank].receive(120, self.processes[rank].said)
        if isinstance(said, tuple) and said[0] == "failed":
            raise AssertionError(f"rank {rank}: {said[1]}")
        return said

    def answer(self, rank: int) -> Any:
        """What the job of a member returned; it left no thread behind and its process ends."""
        kind, value, threads = self.heard(rank)
        assert (kind, threads) == ("done", [])
        assert self.processes[rank].wait() == 0
        return value

    def answers(self) -> list[Any]:
        return [self.answer(rank) for rank in range(len(self.processes))]
