"""Forks the programs of a swarm, as benchmarks/swarms/nursery.py forks its peers.

{"program": "perfect.train", "arguments": ["run.yaml", "--join", ...], "cwd": FOLDER, "out": FOLDER}
"""

import os
import sys
from typing import Any

import perfect.anchor
import perfect.replay
import perfect.train
from benchmarks.swarms import nursery

MAINS = {
    "perfect.anchor": perfect.anchor.main,
    "perfect.replay": perfect.replay.main,
    "perfect.train": perfect.train.main,
}


def run(settings: dict[str, Any]) -> None:
    os.chdir(settings["cwd"])
    code = MAINS[settings["program"]](settings["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)


if __name__ == "__main__":
    nursery.PROGRAMS = {**nursery.PROGRAMS, **dict.fromkeys(MAINS, run)}
    nursery.main()
