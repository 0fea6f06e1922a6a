"""What is measured so far: one JSON line a cell, on disk as soon as it is there.

A line that a crash cut short does not count. Of several lines of a cell the last one does. Cells of
another device are another's: a run goes on only where it was begun.
"""

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.part import Found, Row
from benchmarks.harness.machine import read_commit


@dataclass(frozen=True, slots=True)
class Line:
    """One cell: its row, or why there is none."""

    cell: str
    device: str
    row: Row | None
    problem: str
    seconds: float
    date: str
    commit: str = ""
    """Empty in lines older than 2026-11-24."""
    torch: str = ""


class Store:
    def __init__(self, folder: Path, stem: str, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{stem}.jsonl"
        self.device = device
        self.commit = read_commit()

    def add(self, cell: str, row: Row | None, problem: str = "", seconds: float = 0.0) -> None:
        """With one write: a process that ends in mid-line leaves no half of it among others."""
        line = {
            "cell": cell, "device": self.device, "row": row, "problem": problem,
            "seconds": round(seconds, 3), "date": datetime.date.today().isoformat(),
            "commit": self.commit, "torch": torch.__version__,
        }  # fmt: skip
        text = json.dumps(line) + "\n"
        if self._cut_short():
            text = "\n" + text
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _cut_short(self) -> bool:
        return self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")

    def lines(self) -> dict[str, Line]:
        """Of this device, by cell."""
        if not self.path.exists():
            return {}
        found: dict[str, Line] = {}
        for text in self.path.read_text(encoding="utf-8").splitlines():
            line = _line(text)
            if line is not None and line.device == self.device:
                found[line.cell] = line
        return found

    def missing(self, cells: Sequence[str]) -> list[str]:
        there = self.lines()
        return [cell for cell in cells if cell not in there]

    def forget_failures(self) -> None:
        """Of every device. All lines or the old ones: the file is replaced."""
        if not self.path.exists():
            return
        kept = [text for text in self.path.read_text(encoding="utf-8").splitlines() if _well(text)]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(f"{text}\n" for text in kept), encoding="utf-8")
        os.replace(partial, self.path)

    def found(self, cells: Sequence[str], smoke: bool) -> Found:
        lines = self.lines()
        there = {cell: lines[cell] for cell in cells if cell in lines}
        return Found(
            rows={c: line.row for c, line in there.items() if line.row is not None},
            problems={c: line.problem for c, line in there.items() if line.problem},
            missing=[c for c in cells if c not in there],
            device=self.device,
            smoke=smoke,
            cells=cells,
        )


def _line(text: str) -> Line | None:
    """None: it was cut short."""
    try:
        return Line(**json.loads(text))
    except (json.JSONDecodeError, TypeError):
        return None


def _well(text: str) -> bool:
    line = _line(text)
    return line is not None and not line.problem
