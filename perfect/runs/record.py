"""The records of a run: metrics.csv is written while it runs, run.json whenever it stops.

`RunLog` is a Lightning logger, so everything that a module logs is in metrics.csv, one row for each
step that logged; columns are added when they first appear. A resumed run drops the rows after its
checkpoint. Its clock continues from there, so `wall_seconds` never counts a step twice.
"""

import csv
import json
import logging
import math
import os
import platform
import re
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.callbacks.train_loaders import in_memory
from perfect.errors import FolderError
from perfect.runs.stall_log import stall_log
from perfect.version import own_version

log = logging.getLogger(__name__)

FIRST_COLUMNS = ("step", "wall_seconds")


class RunLog(Logger):
    """Writes metrics.csv in `folder`."""

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.perf_counter,
        *,
        own_folder: bool = False,
    ) -> None:
        """`own_folder`: every rank has one, and writes there. Otherwise rank 0 writes."""
        super().__init__()
        self._own_folder = own_folder
        self.folder = folder
        self.path = folder / "metrics.csv"
        self.rows: list[dict[str, float]] = []
        self._columns = list(FIRST_COLUMNS)
        self._kept = 0
        """So many rows are in the file. 0: it has to be written as a whole."""
        self._full = False
        self._clock = clock
        self._started = clock()
        self._before = 0.0

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def version(self) -> str:
        return ""

    @property
    def wall_seconds(self) -> float:
        """The seconds that this run has been running, before and after resuming."""
        return self._before + self._clock() - self._started

    def resume(self, step: int) -> None:
        """Continue after `step` optimizer steps, and drop later rows, whose work was lost."""
        if not self.path.exists():
            return
        text = self.path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]  # a kill may have torn the last row
        try:
            reader = csv.DictReader(whole.splitlines())
            rows = [{k: float(v) for k, v in row.items() if v} for row in reader]
            self._columns = list(reader.fieldnames or FIRST_COLUMNS)
            self.rows = [row for row in rows if row["step"] < step]
            self._before = self.rows[-1]["wall_seconds"] if self.rows else 0.0
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            why = f"{type(error).__name__}: {error}"
            raise FolderError(f"{self.path} is damaged ({why}): delete it to go on") from error
        self._started = self._clock()
        self._write_all()
        self._kept = len(self.rows)

    @property
    def _writes(self) -> bool:
        return self._own_folder or not getattr(rank_zero_only, "rank", 0)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self._writes:
            return
        row = {"step": float(step or 0), "wall_seconds": round(self.wall_seconds, 3)}
        row |= {name: float(value) for name, value in metrics.items() if name != "epoch"}
        self.rows.append(row)
        if new := [name for name in row if name not in self._columns]:
            self._columns += new
            self._kept = 0
        if new or (len(self.rows) - self._kept) % 20 == 0:
            self.save()

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: config.yaml has them."""

    def save(self) -> None:
        """Write what is not in the file yet. On a full disk that is logged and tried again."""
        if self._kept == len(self.rows) or not self._writes:
            return
        try:
            if self._kept:
                with self.path.open("a", newline="", encoding="utf-8") as file:
                    csv.DictWriter(file, self._columns).writerows(self.rows[self._kept :])
            else:
                self._write_all()
            self._kept = len(self.rows)
            self._full = False
        except OSError as error:
            if not self._full:
                log.error("%s is not written (%s): free some space", self.path, error)
            self._full = True
            self._kept = 0  # the last row may be torn

    def finalize(self, status: str) -> None:
        self.save()

    def _write_all(self) -> None:
        part = self.path.with_suffix(".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(part, self.path)


def write_run(path: Path, run: dict[str, Any]) -> None:
    write_whole(path, json.dumps(_plain(run), indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: a kill must not leave half a file."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def describe_run(
    *, name: str, seed: int, config: dict[str, Any], chosen: dict[str, Any], resumed_at: list[int]
) -> dict[str, Any]:
    """Return what is known of a run before its first step. `chosen`: what is no default."""
    return {
        "status": "running",
        "name": name,
        "seed": seed,
        "accuracy": None,
        "accuracy_on": None,
        "perplexity": None,
        "perplexity_on": None,
        "best_accuracy": None,
        "steps": 0,
        "error": None,
        "resumed_at": resumed_at,
        "environment": environment(),
        "config": config,
        "chosen": chosen,
    }


def measured(switch: PhaseSwitch, log: RunLog, trainer: L.Trainer) -> dict[str, Any]:
    """Return what a run has done so far."""
    loader = switch.loader
    stats = loader.stats if loader is not None else None
    samples = len(loader.dataset) if loader is not None else 0
    ranks = trainer.world_size  # every rank serves as much as this one
    offload = stall_log(trainer).section()
    held_out = [v for row in log.rows if math.isfinite(v := row.get("val_accuracy", math.nan))]
    return {
        "best_accuracy": max(held_out, default=None),
        "steps": trainer.global_step,
        "not_saved_since": getattr(trainer.checkpoint_callback, "not_saved_since", None),
        "wall_seconds": log.wall_seconds,
        "stall_seconds": stats.stall_seconds if stats else 0.0,
        "serve_seconds": stats.serve_seconds if stats else 0.0,
        "decoded_samples": ranks * stats.decoded if stats else 0,
        "extra_decodes": ranks * stats.extra_decodes if stats else 0,
        "cached_samples": ranks * stats.cached if stats else 0,
        "skipped_samples": stats.skipped if stats else 0,  # on this rank
        "served_samples": ranks * stats.served if stats else 0,
        "buffer_bytes": ranks * stats.buffer_bytes if stats else 0,
        "process_peak_bytes": process_peak_bytes(),
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() or None,
        "train_samples": samples,
        "in_memory": loader is not None and in_memory(loader),
        "fresh_passes": ranks * stats.decoded / samples if stats and samples else 0.0,
        "phases": [asdict(record) for record in switch.records],
        "switches": [asdict(s) for s in switch.policy.switches],
        "trace": [asdict(look) for look in switch.policy.trace],
        **({} if offload is None else {"offload": offload}),
    }


def process_peak_bytes() -> int | None:
    """Return the most memory of this process that was ever resident at the same time. Jobs of a
    fleet that share a process share this number; where nobody counts it is None."""
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else "")
    return int(match[1]) * 1024 if match else None


def environment() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "numpy": numpy.__version__,
        "perfect-training": own_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _plain(value: Any) -> Any:
    """Replace numbers that are not finite by null: JSON has no NaN."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
