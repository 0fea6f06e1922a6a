"""The parent's end of a child: start it, ask it, end it and everything below it."""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.child import serve
from benchmarks.peers.contract import Job, Row

MOST = 160
"""Letters of a failure that the table shows; the rest is in the row's log."""


class PeerFailed(RuntimeError):
    """A peer that is not there or does not work: said in the table, never dropped."""


class Child:
    def __init__(self, row: Row, job: Job, work: Path, patience: float = 600):
        self.row, self.job, self.patience = row, job, patience
        self.work = work / row.name.replace(" ", "_").replace(":", "").replace(",", "")
        self.hello: dict[str, Any] = {}
        self._process: Any = None

    def __enter__(self) -> Self:
        (self.work / "data").mkdir(parents=True, exist_ok=True)
        spawn = multiprocessing.get_context("spawn")
        self._pipe, far = spawn.Pipe()
        given = far, self.row, self.job, self.work, time.monotonic()
        self._process = spawn.Process(target=serve, args=given)
        self._process.start()
        far.close()
        try:
            self.hello = self._answer()
        except PeerFailed:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **arguments: float) -> dict[str, Any]:
        if self._process is None:
            raise PeerFailed("it was ended before")
        with suppress(BrokenPipeError):
            self._pipe.send((do, arguments))
        return self._answer()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()
        process.join(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers; the session is its own
        process.join()

    def _answer(self) -> dict[str, Any]:
        if not self._pipe.poll(self.patience):
            self.close()
            raise PeerFailed(f"no answer within {self.patience:.0f} s")
        try:
            reply = self._pipe.recv()
        except EOFError:
            reply = {"failed": f"it ended: {self._last_words()}"}
        if "missing" in reply:
            raise PeerFailed(f"not installed ({reply['missing']}): {self.row.install}")
        if "failed" in reply:
            raise PeerFailed(f"failed: {reply['failed']}".splitlines()[0][:MOST])
        return reply

    def _last_words(self) -> str:
        lines = (self.work / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"
