"""A picture of the accuracy study: accuracy against decodes.

    python benchmarks/accuracy_picture.py       results/perfect_accuracy_pilot.jsonl -> docs/images/

Every point is a mean over seeds with its standard deviation; all runs in it make 600 steps, but for
those without reuse at fewer decodes, which stop when the decodes are spent.
"""

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
SOURCE = HERE / "results" / "perfect_accuracy_pilot.jsonl"
TARGET = HERE.parent / "docs" / "images" / "accuracy.png"
FRESH, REUSED = "#b4442f", "#1f6f9f"
WITHOUT = (
    "no reuse, 8 fresh, wsd",
    "no reuse, 10.8 fresh, wsd",
    "no reuse, 14.4 fresh, wsd",
    "no reuse, wsd, late decay",
)
LABELS = {
    "best: wsd55 roll12 re ema": ("our recipe", (8, 4)),
    "wsd55 roll3 re ema": ("our recipe, buffer of 3 batches", (8, -4)),
    "perfect40 k1 re, re-raised": ("thesis's 40x3+80,\nscaled", (8, -2)),
    "r3 k3 re, wsd": ("reuse to the end", (6, -14)),
    "r3 k1 no, cosine": ("reuse to the end,\naugmented once", (8, 0)),
}


def points(names: tuple[str, ...]) -> list[tuple[float, float, float]]:
    """(fresh passes, mean, sd) of each row; averaged weights, which both sides have."""
    records = [json.loads(line) for line in SOURCE.read_text().splitlines()]
    found = []
    for name in names:
        rows = [r for r in records if r["name"] == name]
        accuracy = [100 * r["test_ema"] for r in rows]
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        found.append((rows[0]["fresh"], statistics.mean(accuracy), spread))
    return found


def main() -> None:
    figure = Figure(figsize=(7.2, 3.9), layout="constrained")
    axes = figure.add_subplot()
    x, y, sd = zip(*points(WITHOUT), strict=True)
    axes.errorbar(x, y, sd, color=FRESH, marker="o", capsize=3, label="every serve a fresh decode")
    axes.axhline(y[-1], color=FRESH, linewidth=0.8, linestyle=":")
    x, y, sd = zip(*points(tuple(LABELS)), strict=True)
    axes.errorbar(x, y, sd, color=REUSED, marker="o", capsize=3, linestyle="", label="reused")
    for px, py, (label, offset) in zip(x, y, LABELS.values(), strict=True):
        axes.annotate(
            label, (px, py), offset, textcoords="offset points", color=REUSED, fontsize=8.5
        )
    axes.set(
        xlabel="decodes, in passes over the training set",
        ylabel="test accuracy, %",
        xlim=(7, 25),
        title="CIFAR-10, 8000 pictures, small net, 24 epochs' worth of steps, 3 seeds",
    )
    axes.title.set_fontsize(9.5)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(TARGET, dpi=140)


if __name__ == "__main__":
    main()
