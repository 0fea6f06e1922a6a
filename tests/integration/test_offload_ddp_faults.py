"""Something goes wrong on one of two ranks: both end, soon, and say why."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "offload_ranks_faults.py"
LIMIT = 240.0
"""Seconds; gloo itself gives up after 300."""


def start(fault: str, at: int = 4) -> list[subprocess.Popen[str]]:
    """By hand, so that nobody kills one rank because the other has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), fault, str(at)],
            env={**os.environ, **where, "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each rank said at its end."""
    said = []
    try:
        for process in processes:
            out, _ = process.communicate(timeout=LIMIT)
            lines = [line for line in out.splitlines() if line.startswith("ended by ")]
            said.append(lines[0] if lines else f"exit {process.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return said


def test_a_rank_that_dies_ends_the_other_one() -> None:
    zero, one = ended(start("dies"))
    assert one == "exit 3"
    assert zero.startswith("ended by StepError: rank 0 waited for the others")


@pytest.mark.parametrize("at", [0, 4])
def test_an_exception_of_one_rank_ends_the_other_one_which_says_it(at: int) -> None:
    mistake = 'KeyError: "rank 1\'s own mistake"'
    zero, one = ended(start("raises", at))
    assert one == f"ended by {mistake}"
    assert zero.startswith("ended by StepError: rank 0 waited for the others")
    assert zero.endswith(f" rank 1: {mistake}")


def test_a_rank_that_trains_other_parameters_is_an_error_on_all() -> None:
    for said in ended(start("freezes")):
        assert said.startswith("ended by StepError: rank 1 has other gradients in this step")
        assert "head.bias" in said


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
def test_ctrl_c_ends_all_ranks(who: tuple[int, ...]) -> None:
    processes = start("nothing")
    # Whatever a rank says first: it trains.
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "trains\n"
    for rank in who:
        processes[rank].send_signal(signal.SIGINT)
    said = ended(processes)
    interrupted = {rank for rank in who if said[rank] == "ended by SystemExit: 1"}
    for rank, line in enumerate(said):
        # Who is interrupted ends its connections, and another one may hear of that first.
        assert line == "ended by SystemExit: 1" or (
            interrupted - {rank}
            and line.startswith(f"ended by StepError: rank {rank} waited for the others")
        )
