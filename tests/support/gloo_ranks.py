"""Two processes under gloo, each of which writes down what it was told: FOLDER/rank0.json, ..."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

WORLD = 2
Told = Callable[[int, Path], Any]
"""Runs in each rank, with its number and the folder."""


def main(told: Told) -> None:
    """Run a script of the form `python SCRIPT FOLDER`; exits with the worst exit code."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(_run_ranks(told, Path(sys.argv[1])))


def _run_ranks(told: Told, folder: Path) -> int:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(told, rank, folder)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 60
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
    return max(1 if process.exitcode is None else abs(process.exitcode) for process in ranks)


def _rank(told: Told, rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=20),
    )  # fmt: skip
    (folder / f"rank{rank}.json").write_text(json.dumps(told(rank, folder)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
