"""An anchor and peers, as processes of this machine.

with Nursery() as nursery, Swarm(folder, nursery) as swarm:
    peers = [swarm.peer(f"p{i}", steps=20) for i in range(3)]
    peers[0].kill()
    results = [peer.result() for peer in peers[1:]]
"""

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.swarms.anchor import make_anchor
from trainers.elastic.anchor.anchor import Anchor

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.01
PATIENCE_SECONDS = 90.0
PATIENT = 20.0
"""A heartbeat with which a busy machine expels nobody."""


class Nursery:
    """The process that forks the others (nursery.py)."""

    def __init__(self, *program: str) -> None:
        """`program`: what is run instead, and forks more kinds of processes."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *(program or ("-m", "benchmarks.swarms.nursery"))], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            process_group=0,  # a signal to this group ends us, and then we end it
        )  # fmt: skip
        self._lock = threading.Lock()
        self.tasks: int = self._answer()["tasks"]
        """How many threads it has: one."""

    def fork(self, settings: dict[str, Any]) -> int:
        """Return the process id."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer()["pid"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the nursery has ended with code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it, and all that it has forked."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_SECONDS)
        self._process.stdout.close()

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Process:
    """A process that a nursery has forked."""

    def __init__(self, nursery: Nursery, settings: dict[str, Any]) -> None:
        self.out = Path(settings["out"])
        self.out.mkdir(parents=True, exist_ok=True)
        self.settings = settings
        self.pid = nursery.fork(settings)

    @property
    def code(self) -> int | None:
        """Its exit code, -9 for SIGKILL; None while it runs."""
        told = self.out / "ended.json"
        return json.loads(told.read_text())["code"] if told.exists() else None

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Return its exit code."""
        until(lambda: self.code is not None, f"the end of {self.out.name}", seconds, self.said)
        assert self.code is not None
        return self.code

    def said(self) -> str:
        path = self.out / "said.txt"
        return path.read_text() if path.exists() else ""

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by SIGSTOP."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    # ---- of a peer -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.settings.get("name", self.out.name)

    @property
    def step(self) -> int:
        told = self.out / "step"
        return int(told.read_text() or 0) if told.exists() else 0

    def until_step(self, step: int) -> None:
        until(lambda: self.step >= step, f"step {step} of {self.name}", PATIENCE_SECONDS, self.said)

    def happened(self) -> list[dict[str, Any]]:
        """The faults that have happened to it."""
        path = self.out / "happened.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def result(self, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """Wait for its end, and return what it tells; raise where it was killed."""
        if (code := self.wait(seconds)) != 0:
            raise RuntimeError(f"{self.name} has ended with {code}: {self.said()}")
        return json.loads(self.out.joinpath("result.json").read_text())

    @property
    def log(self) -> Path:
        return self.out / "elastic" / f"{self.name}.jsonl"


class Swarm:
    """An anchor on a thread of this process, and peers that know its address."""

    def __init__(self, folder: Path, nursery: Nursery, *, own_anchor: bool = True, **anchor: Any):
        """`anchor`: as `make_anchor` takes it. Without `own_anchor`, begin some by `anchor`."""
        self.folder = folder
        self.nursery = nursery
        folder.mkdir(parents=True, exist_ok=True)
        self.secret = folder / "secret"
        if not self.secret.exists():
            self.secret.touch(0o600)
            self.secret.write_text(secrets.token_hex(16))
        self.told: list[str] = []
        self.processes: list[Process] = []
        self.peers: list[Process] = []
        self.join = ""
        self.own: Anchor | None = None
        if own_anchor:
            self.own = make_anchor(
                {"secret": self.secret, "heartbeat": PATIENT, **anchor}, self.told.append
            )
            self.join = str(self.own.address)
            self._thread = threading.Thread(target=self.own.run, name="swarm-anchor")
            self._thread.start()

    def peer(self, name: str, **settings: Any) -> Process:
        """Begin a peer."""
        given = {
            "program": "peer", "name": name, "out": str(self.folder / name),
            "secret": str(self.secret), "join": self.join,
        }  # fmt: skip
        process = Process(self.nursery, {**given, **settings})
        self.processes.append(process)
        self.peers.append(process)
        return process

    def anchor(self, name: str, **settings: Any) -> Process:
        """Begin an anchor as a process of its own. It can be killed."""
        given = {"program": "anchor", "out": str(self.folder / name), "secret": str(self.secret)}
        process = Process(self.nursery, {**given, **settings})
        self.processes.append(process)
        address = process.out / "address.txt"
        until(address.exists, f"the address of {name}", PATIENCE_SECONDS, process.said)
        return process

    def replay(self, peers: list[Process] | None = None, **settings: Any) -> Process:
        """Train again in one process what the logs of peers tell."""
        logs = [str(peer.log) for peer in peers or self.peers if peer.log.exists()]
        return self.peer("replay", replay=logs, **settings)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        if self.own is not None:
            self.own.close()
            self._thread.join()
        for process in self.processes:
            process.wait()

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until(
    is_so: Callable[[], bool], what: str, seconds: float, more: Callable[[], str] = str
) -> None:
    """Wait until something is so; raise TimeoutError if it does not come about."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come in {seconds:g} s\n{more()}")
        select.select([], [], [], POLL_SECONDS)


def free_ports(count: int) -> list[int]:
    """Return ports at which nobody listens now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
