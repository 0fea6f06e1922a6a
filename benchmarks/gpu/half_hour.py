"""One phase of half an hour: its pieces in turn, what each said, and how far it came.

    STATE/done.json      pieces that came to their end: they are not run again
    STATE/pieces.jsonl   every attempt: piece, exit status, seconds, commit, machine
    STATE/PHASE PIECE.log, the suite's JSON, tests' XML   -> all copied to OUT when the phase ends

A part of the suite that says "not finished" has more cells, so its piece is run again next time.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from provenance import commit

from gpu.machine import record
from gpu.phases import Piece, phases

LIMIT = 9.6
"""Minutes of a phase: a command on the machine has ten."""
KEPT = (".json", ".jsonl", ".md", ".png", ".xml", ".log")
NOT_FINISHED = "not finished"
OTHERS = {"pytest": 5}
"""No test was collected: every one of them needs a GPU, and a smoke run has none."""


@dataclass(frozen=True, slots=True)
class Places:
    state: Path
    carried: Path
    out: Path | None

    def fill(self, word: str) -> str:
        return word.format(
            python=sys.executable, state=self.state, carried=self.carried, data=self.state / "data"
        )


@dataclass(slots=True)
class Begun:
    piece: Piece
    process: subprocess.Popen[str]
    log: Path
    said: IO[str]
    at: float


class Phase:
    """The pieces of one phase that are not done yet."""

    def __init__(self, name: str, smoke: bool, places: Places) -> None:
        self.name, self.smoke, self.places = name, smoke, places
        self.done_file = places.state / "done.json"
        self.until = time.monotonic() + 60 * LIMIT
        self.failed: list[str] = []

    def run(self) -> int:
        self.places.state.mkdir(parents=True, exist_ok=True)
        beside: list[Begun] = []
        for piece in phases(self.smoke)[self.name]:
            if (self.smoke and not piece.smoke) or self._key(piece) in self._done():
                continue
            begun = self._begin(piece)
            if piece.beside:
                beside.append(begun)
            else:
                self._end(begun)
        for begun in beside:
            self._end(begun)
        if self.places.out is not None:
            copy(self.places.state, self.places.out)
        print(f"{self.name}: {'failed: ' + ', '.join(self.failed) if self.failed else 'done'}")
        return 1 if self.failed else 0

    def _key(self, piece: Piece) -> str:
        return f"{self.name} {piece.name}"

    def _done(self) -> list[str]:
        return json.loads(self.done_file.read_text()) if self.done_file.exists() else []

    def _begin(self, piece: Piece) -> Begun:
        log = self.places.state / f"{self._key(piece)}.log"
        said = log.open("w", encoding="utf-8")
        command = [self.places.fill(word) for word in piece.command]
        print(f"{piece.name}: {' '.join(command)}", flush=True)
        # A group of its own, so that what it started ends with it.
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        return Begun(piece, process, log, said, time.monotonic())

    def _end(self, begun: Begun) -> None:
        """Wait for it, but not beyond its minutes, or the phase's."""
        piece, process = begun.piece, begun.process
        limit = min(begun.at + 60 * piece.minutes, self.until) - time.monotonic()
        try:
            status = process.wait(timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        begun.said.close()
        text = begun.log.read_text(encoding="utf-8", errors="replace")
        none = self.smoke and "pytest" in piece.command and status == OTHERS["pytest"]
        good = status == 0 or none
        line = {
            "phase": self.name, "piece": piece.name, "status": status, "smoke": self.smoke,
            "seconds": round(time.monotonic() - begun.at, 1), "commit": commit(),
            "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": record("cpu" if self.smoke else "cuda"),
        }  # fmt: skip
        with (self.places.state / "pieces.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{piece.name}: status {status}, {line['seconds']} s\n{_tail(text)}", flush=True)
        if not good:
            self.failed.append(piece.name)
        elif NOT_FINISHED not in text:
            done = [*self._done(), self._key(piece)]
            partial = self.done_file.with_suffix(".partial")
            partial.write_text(json.dumps(done))
            os.replace(partial, self.done_file)


def copy(state: Path, out: Path) -> None:
    """Results and logs, without data and checkpoints."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(state.iterdir()):
        if path.is_file() and path.suffix in KEPT:
            shutil.copy(path, out / path.name)


def _tail(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-5:])


def pack(cifar: Path, carried: Path) -> int:
    """The archives and the wheels, each part below 60 MB."""
    commands = [
        [sys.executable, "-m", "gpu.carried", "pack", str(cifar), str(carried)],
        *(
            ["bash", "benchmarks/gpu/wheels.sh", part, str(carried)]
            for part in ("few", "peers", "roundpipe")
        ),
    ]
    return max(subprocess.run(command, check=False).returncode for command in commands)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/half_hour.sh", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("phase", choices=["pack", *phases(False)])
    parser.add_argument("--smoke", action="store_true", help="on the CPU, tiny: that it works")
    args = parser.parse_args(argv)
    carried = Path(os.environ.get("CARRIED", "runs/carried"))
    if args.phase == "pack":
        if "CIFAR" not in os.environ:
            parser.error("pack: CIFAR=... names the folder that holds data_batch_1 and the others")
        return pack(Path(os.environ["CIFAR"]), carried)
    state = Path(os.environ.get("STATE", "runs/half_hour")).resolve()
    out = os.environ.get("OUT")
    return Phase(args.phase, args.smoke, Places(state, carried, Path(out) if out else None)).run()


if __name__ == "__main__":
    raise SystemExit(main())
