"""Runs the demo: `python examples/demo FOLDER`, which `make demo` does.

    draw pictures | import torch
    equal decodes | a model that does not fit, kill -9     side by side, a core each
    four learning rates                                    alone, because it is about seconds

The last lines say what came of each promise. Exit code 1: one of them did not hold.
"""

import subprocess
import sys
import time
from pathlib import Path
from shutil import rmtree
from typing import Any

from children import BEGUN, Child, Died, say

DRAW = Path(__file__).parents[1] / "make_pictures.py"


def main(folder: Path) -> int:
    pictures, work = folder / "pictures", folder / "work"
    rmtree(work, ignore_errors=True)
    say("drawing pictures, and importing torch and Lightning")
    with subprocess.Popen([sys.executable, str(DRAW), str(pictures)]) as drawing:
        import equal_decodes
        import four_rates
        import killed
        import too_large

        import perfect.train  # noqa: F401  which every child needs
    if drawing.returncode:
        return 1
    decodes = begin(equal_decodes, work / "equal_decodes", pictures)
    fits = end(begin(too_large, work / "too_large"))
    resumed = end(begin(killed, work / "killed", pictures))
    outcomes = [end(decodes), fits, resumed]
    outcomes += [end(begin(four_rates, work / "four_rates", pictures))]
    return show(outcomes, folder / "index.html")


def begin(promise: Any, folder: Path, *args: Any) -> tuple[Any, Child]:
    """Start a promise, which is a module, in a process of its own."""
    folder.mkdir(parents=True)
    return promise, Child(folder / "log.txt", promise.run, folder, *args)


def end(begun: tuple[Any, Child]) -> Any:
    """Wait for what came of a promise. One whose run failed did not hold."""
    from front_page import Outcome

    promise, child = begun
    try:
        return child.result()
    except Died as error:
        return Outcome(promise.PROMISE, str(error), "", held=False)


def show(outcomes: list[Any], page: Path) -> int:
    """Print a line for each promise, write the page, and return the exit code."""
    from front_page import write_page

    for one in outcomes:
        print(f"{one.verdict:6}  {one.promise}: {one.ours}. Otherwise: {one.otherwise}")
    write_page(outcomes, time.monotonic() - BEGUN, page)
    print(f"page    {page}")
    return 0 if all(one.held for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
