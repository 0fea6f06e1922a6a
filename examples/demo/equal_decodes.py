"""Promise 1: as many decoded pictures teach more when each is served several times.

reuse.yaml   3 passes, each picture served 4 times, then 3 fresh ones    6 decodes a picture
equal.yaml   6 passes, every serve a fresh decode                        6
fresh.yaml   15 passes, every serve a fresh decode                      15
"""

import json
import math
from pathlib import Path
from typing import Any

from children import perfect_train, recipe_of, say
from front_page import Outcome, drawn

from perfect.report.page import note
from perfect.report.panels import BLUE, ORANGE
from perfect.report.words import percent

PROMISE = "Equal decodes"
RUNS = {
    "reuse": "with reuse: 3 passes served 4 times, then 3 fresh",
    "equal": "without reuse: 6 passes",
    "fresh": "without reuse: 15 passes",
}


def run(folder: Path, pictures: Path) -> Outcome:
    """Train three times, one after the other."""
    found = {}
    for name, what in RUNS.items():
        say(f"{PROMISE}: training {what}")
        perfect_train(recipe_of(name, pictures), folder / name).result()
        found[name] = json.loads((folder / name / "run.json").read_text())
    return judge(found, tested=len(list(pictures.glob("val/*/*.jpg"))))


def judge(runs: dict[str, Any], tested: int) -> Outcome:
    """The promise holds if the decodes are equal, and the intervals of accuracy are apart."""
    decodes = {name: runs[name]["decoded_samples"] for name in RUNS}
    spans = {name: wilson(runs[name]["accuracy"], tested) for name in RUNS}
    told = {
        name: f"{percent(runs[name]['accuracy'])} ({100 * low:.1f} to {100 * high:.1f})"
        for name, (low, high) in spans.items()
    }

    def draw(axes: Any) -> None:
        for name, what in RUNS.items():
            at, mean, ends = decodes[name], 100 * runs[name]["accuracy"], spans[name]
            colour = ORANGE if name == "reuse" else BLUE
            axes.plot([at, at], [100 * end for end in ends], color=colour, linewidth=3)
            axes.plot(at, mean, "o", color=colour)
            label, offset = what.split(":")[0], {"xytext": (8, -3), "textcoords": "offset points"}
            axes.annotate(label, (at, mean), color=colour, **offset)
        axes.set_xlim(0, 1.4 * max(decodes.values()))
        axes.set_xlabel("pictures decoded")

    return Outcome(
        PROMISE,
        f"{told['reuse']} after {decodes['reuse']:,} decodes",
        f"{told['equal']} after as many; {told['fresh']} after {decodes['fresh']:,}",
        decodes["reuse"] == decodes["equal"] and spans["reuse"][0] > spans["equal"][1],
        (
            drawn("Test accuracy, %", draw),
            note(f"In brackets: Wilson's interval of 95 % for {tested:,} test pictures."),
            note(cache_line(decodes["reuse"] // 6, epochs=15, passes=6)),
        ),
    )


def cache_line(pictures: int, epochs: int, passes: int) -> str:
    """Say where a cache wins (docs/loader/cache.md)."""
    share = percent(1 - (passes - 1) / (epochs - 1), 0)
    return (
        f"A cache wins here, with {pictures:,} decodes: all decoded pictures fit into memory. It"
        f" wins wherever it holds more than f = 1 - (P - 1) / (E - 1) = {share} of them, with"
        f" P = {passes} passes of decodes for E = {epochs} epochs of training."
    )


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a share that `count` trials gave."""
    middle, whole = share + z * z / (2 * count), 1 + z * z / count
    reach = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return (middle - reach) / whole, (middle + reach) / whole
