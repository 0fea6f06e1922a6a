"""Mutates step logs, a fleet's journal and what a sampler was asked, and plan caches; reads them.

    cd tests; python -m fuzz.fuzz_logs --seconds 60 --seed 0

A reader may refuse what it reads by an error of ours. Any other exception ends the program with
exit code 1, after the seed of that input and the input.
"""

import contextlib
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.fuzzing import TryOne, damaged, deepened, main, mutated

from offload.caching.plan_cache import PlanCache
from perfect.runs.swarm_figures import swarm_record
from trainers.elastic.errors import LogDamaged
from trainers.elastic.peer.step_log import Era, StepLog, newest_era, read_history, read_lines
from trainers.fleet import Fleet, FleetError
from trainers.fleet.keeping.journal import Journal
from trainers.fleet.search.optuna_search import SEARCH_FILE, AskedTrials

RUN = {"lanes": 4, "sum": "fast", "micro": 2}
STEP_LOG: list[dict[str, Any]] = [
    {"run": RUN, "time": 0.5},
    {"begins": 0, "with": "nothing", "era": Era("x", 1).plain(), "time": 1.0},
    {"generation": 1, "members": ["a", "b"], "step": 0, "era": "x", "time": 1.5},
    {"commit": 0, "added": [["a", [0, 2]], ["b", [1, 3]]], "digest": "d0", "time": 2.0,
     "peers": [["a", 4, 0.2, 900], ["b", 4, 0.2, 900]]},
    {"gap": 0.31, "why": "b is gone", "step": 1, "time": 2.5},
    {"begins": 1, "with": "checkpoint", "era": Era("y", 2, "x", 1).plain(), "time": 3.0},
    {"commit": 1, "added": [["a", [0, 1, 2, 3]]], "digest": "d1", "time": 3.5},
]  # fmt: skip
TURN: dict[str, Any] = {
    "event": "TurnEnded", "job": "a", "device": 0, "step": 5, "steps": 5, "left": 5,
    "seconds": 0.1, "swap_seconds": 0.0, "metric": 0.5, "instead": "", "aside": False, "input": "",
    "waits_for": [],
}  # fmt: skip
JOURNAL: list[dict[str, Any]] = [
    {"fleet": {"stop": "None", "metric": None, "mode": "min"}},
    {"settings": {"devices": 1, "host_bytes": 1 << 30, "quantum": 5, "rule": None}},
    {"event": "Added", "job": "a", "priority": 0},
    {"event": "Planned", "job": "a", "device": 0, "step": 0, "left": 10, "step_seconds": 0.1,
     "tail_seconds": 0.0, "swap_seconds": 0.0, "memory": {"host_bytes": 9, "arena_bytes": 5}},
    TURN,
    {"event": "Finished", "job": "a", "device": 0, "step": 10, "seconds": 0.1, "metric": 0.4},
]  # fmt: skip


def written(lines: list[Any], rng: random.Random) -> bytes:
    """Return mutated lines of JSON, in some cases with damaged bytes."""
    for _ in range(rng.randrange(3)):
        lines = mutated(lines, rng)
        lines = lines if isinstance(lines, list) else [lines]
    data = deepened("".join(json.dumps(line) + "\n" for line in lines), rng) or b" "
    return data if rng.random() < 0.6 else damaged(data, rng)


def read_step_log(folder: Path, rng: random.Random) -> None:
    path = folder / "a.jsonl"
    path.write_bytes(written(STEP_LOG, rng))
    for read in (lambda: read_history([path]), lambda: newest_era([path]),
                 lambda: json.dumps(swarm_record(read_lines(path)), ensure_ascii=False).encode(),
                 lambda: StepLog(path, RUN).close(), lambda: read_history([path])):  # fmt: skip
        with contextlib.suppress(LogDamaged):
            read()


def read_journal(folder: Path, rng: random.Random) -> None:
    (folder / "journal.jsonl").write_bytes(written(JOURNAL, rng))
    fleet = Fleet(folder=folder, devices=["cpu"], isolation="thread", host_budget="1GiB")
    fleet.add_program("a", lambda seat: None)
    # A journal is read and told again before the settings are noted; no job is needed after it.
    with patch.object(Journal, "begin", side_effect=FleetError), contextlib.suppress(FleetError):
        fleet.fit()


def read_asked(folder: Path, rng: random.Random) -> None:
    asked = {"trial-0": {"lr": 0.1, "depth": 2}, "trial-1": {"lr": 0.2}}
    (folder / SEARCH_FILE).write_bytes(written([asked], rng))
    with contextlib.suppress(FleetError):
        AskedTrials(folder).note("trial-0", {"lr": 0.1, "depth": 2})


def read_plan_cache(folder: Path, rng: random.Random) -> None:
    cache = PlanCache(folder / "plans")
    cache.write("plan", ("a", 1), {"numbers": [1, 2.5, None], "text": "x"})
    [path] = (folder / "plans").glob("plan-*.json")
    path.write_bytes(written([json.loads(path.read_bytes())], rng))
    cache.read("plan", ("a", 1))


READERS: tuple[Callable[[Path, random.Random], None], ...] = (
    read_step_log, read_journal, read_asked, read_plan_cache,
)  # fmt: skip


@contextlib.contextmanager
def fuzzer() -> Iterator[TryOne]:
    """Give what tries one input with one of the readers."""
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        def try_one(rng: random.Random) -> None:
            read = rng.choice(READERS)
            try:
                read(folder, rng)
            except Exception as error:
                left = {p.name: p.read_bytes()[:2000] for p in folder.rglob("*.json*")}
                error.add_note(f"{read.__name__}: {left}")
                raise

        yield try_one


if __name__ == "__main__":
    sys.exit(main(__doc__, fuzzer))
