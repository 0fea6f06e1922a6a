"""The parent's end of a child: start it, ask it, end it and everything below it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.contract import Job, Row

ROOT = Path(__file__).resolve().parents[2]
MOST = 160
"""Letters of a failure that the table shows; the rest is in the row's log."""


class PeerFailed(RuntimeError):
    """A peer that is not there or does not work: said in the table, never dropped."""


class Child:
    def __init__(self, row: Row, job: Job, work: Path, patience: float = 600):
        self.row, self.job, self.patience = row, job, patience
        self.work = work / row.name.replace(" ", "_").replace(":", "").replace(",", "")
        self.hello: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        (self.work / "data").mkdir(parents=True, exist_ok=True)
        with (self.work / "log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.child"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        job = asdict(self.job) | {"folder": str(self.job.folder)}
        try:
            self.hello = self._exchange({
                "peer": self.row.peer, "options": dict(self.row.options), "job": job,
                "work": str(self.work / "data"), "packages": self.row.packages,
                "spawned": time.monotonic(),
            })  # fmt: skip
        except PeerFailed:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **arguments: float) -> dict[str, Any]:
        return self._exchange({"do": do} | arguments)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers; the session is its own
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise PeerFailed("it was ended before")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        if not select.select([process.stdout], [], [], self.patience)[0]:
            self.close()
            raise PeerFailed(f"no answer within {self.patience:.0f} s")
        line = process.stdout.readline()  # the child writes whole lines
        reply = json.loads(line) if line else {"failed": f"it ended: {self._last_words()}"}
        if "missing" in reply:
            raise PeerFailed(f"not installed ({reply['missing']}): {self.row.install}")
        if "failed" in reply:
            raise PeerFailed(f"failed: {reply['failed']}".splitlines()[0][:MOST])
        return reply

    def _last_words(self) -> str:
        lines = (self.work / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"
