"""A fleet that is killed at events given by number, and goes on each time; and what it became.

    python -m benchmarks.fleet.killed_run FOLDER 7 13
    a child: SIGKILL at its 7th event | another: SIGKILL at its 13th | another: to the end

Children are forks of a process that has only imported, so that a run costs no second import.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.jobs.fleet_jobs import BUDGET, KINDS
from trainers.fleet import Fleet, Halving
from trainers.fleet.deciding.events import Event
from trainers.fleet.deciding.fleet_state import FleetState
from trainers.fleet.jobs.job_turns import FINAL

NAMES = ("adam", "sgd", "plain")
EPOCHS = 3
ANSWER = "outcome.json"
ROOT = Path(__file__).parents[2]


def run(folder: Path, die_at: int | None = None) -> int:
    """Run the fleet, and end this process with SIGKILL at an event: its number, from 1. Return how
    many events there were."""
    seen = 0

    def count(_state: FleetState, _event: Event) -> None:
        nonlocal seen
        seen += 1
        if seen == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    rule = Halving("val_loss", eta=2, first=7)  # between two validations, after 5 and 10 steps
    fleet = Fleet(
        BUDGET, "cpu", folder=folder, quantum=1, stop=rule, checkpoint_minutes=1e-9, watch=count
    )
    for name in NAMES:
        kind = replace(KINDS[name], epochs=EPOCHS)
        fleet.add(
            name, kind.module, train=kind.train, val=kind.val, trainer=kind.trainer,
            offload=False if kind.options is None else kind.options,
        )  # fmt: skip
    result = fleet.fit()
    answer = {
        "events": seen,
        "jobs": {name: [job.state, job.step, job.why] for name, job in result.jobs.items()},
        "metrics": {name: dict(sorted(seen.items())) for name, seen in result.history.items()},
        "weights": {name: digest(folder / "jobs" / name / FINAL) for name in NAMES},
    }
    (folder / ANSWER).write_text(json.dumps(answer))
    return seen


def digest(checkpoint: Path) -> str | None:
    """Return what tells the weights of a checkpoint from others; None if it is not there."""
    if not checkpoint.exists():
        return None
    found = hashlib.sha256()
    for key, value in torch.load(checkpoint)["state_dict"].items():
        found.update(key.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def outcome(folder: Path, moments: Sequence[int] = ()) -> dict[str, Any]:
    """Return what the fleet becomes in another process that is killed at these events, one after
    the other, and then runs to its end. Its `kills` are those that came before the end."""
    command = [sys.executable, "-m", "benchmarks.fleet.killed_run", str(folder), *map(str, moments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, cwd=ROOT
    )
    if done.returncode:
        raise AssertionError(f"the run ended with {done.returncode}: {done.stderr[-3000:]}")
    return json.loads((folder / ANSWER).read_text()) | {"kills": json.loads(done.stdout)}


def main(folder: Path, moments: Sequence[int]) -> None:
    warnings.simplefilter("ignore")
    kills: list[int] = []
    for moment in (*moments, None):
        child = os.fork()
        if not child:
            os.dup2(2, 1)  # what Lightning says must not be in the answer
            run(folder, moment)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if moment is not None and ended == -signal.SIGKILL:
            kills.append(moment)
        elif ended:
            sys.exit(f"a child ended with {ended}")
    print(json.dumps(kills))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])
