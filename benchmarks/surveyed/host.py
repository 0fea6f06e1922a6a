"""Trains cases with the code that PYTHONPATH names, one process after the other.

    python -m surveyed.host FOLDER PLAIN LIMIT STEPS BATCHES NAME ...

    plain                           its end is kept in PLAIN, for the other version of the code too
    budget 80 %  --too small-->  100 %
                 --refused---->  without a budget

The processes are forks of one that has imported the libraries. FOLDER/NUMBER.json has the runs;
those that are there already are not made again.
"""

import json
import multiprocessing
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surveyed.fit import PLAIN, train
from surveyed.outcome import Row, Run
from surveyed.registry import LIBRARIES, cases

SHARE = "80%"


def main() -> None:
    folder, plain, limit, steps, different, *names = sys.argv[1:]
    children: Any = multiprocessing.get_context("forkserver")
    children.set_forkserver_preload(["surveyed.fit", "trainers", *LIBRARIES])
    host = Host(children, Path(folder), Path(plain), float(limit), int(steps), int(different))
    numbers = {name: number for number, name in enumerate(cases())}
    for name in names:
        if (kept := Path(folder) / f"{numbers[name]}.json").exists():
            continue
        runs = host.runs(name, numbers[name])
        row = Row(name, cases()[name].library, tuple(runs))
        print(f"{name} | {row.status} | {row.why}", flush=True)
        kept.write_text(json.dumps([asdict(run) for run in runs]))


class Host:
    def __init__(
        self, children: Any, folder: Path, plain: Path, limit: float, steps: int, different: int
    ) -> None:
        self._children = children
        self._folder = folder
        self._plain = plain
        self._limit = limit
        self._steps = steps, different

    def runs(self, name: str, number: int) -> list[Run]:
        kept = self._plain / f"{number}.pt"
        if not kept.exists():
            plain = self._run(name, PLAIN, kept)
            if plain.error:
                return [plain]
        found = [self._run(name, SHARE, kept)]
        if found[0].error:
            rest = "100%" if found[0].error == "BudgetTooSmall" else "none"
            found.append(self._run(name, rest, kept))
        if any(run.differing for run in found):
            found.append(self._run(name, PLAIN, kept))  # does plain Lightning repeat itself?
        return found

    def _run(self, name: str, budget: str, kept: Path) -> Run:
        answer = self._folder / "answer.json"
        answer.unlink(missing_ok=True)
        log = self._folder / "log.txt"
        child = self._children.Process(
            target=train, args=(name, budget, *self._steps, str(kept), str(answer), str(log))
        )
        child.start()
        child.join(self._limit)
        if child.exitcode is None:
            child.kill()
            child.join()
            return Run(budget, error="hung", said=f"no end after {self._limit:g} s")
        if not answer.exists():
            return Run(budget, error="crashed", said=f"exit code {child.exitcode}")
        told = json.loads(answer.read_text())
        return Run(**told | {"differing": tuple(told["differing"])})


if __name__ == "__main__":
    main()
