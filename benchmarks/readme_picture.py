"""The README's picture: the four promises of `make demo`, from results/promises.json.

python -m benchmarks.readme_picture        benchmarks/results/promises.json -> docs/images/
"""

import json
import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
SOURCE = HERE / "results" / "promises.json"
TARGET = HERE.parent / "docs" / "images" / "promises.png"
OURS, OTHERWISE, INK = "#1f6f9f", "#b4442f", "#222222"


def numbers(text: str) -> list[float]:
    found = re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?", text)
    return [float(number.replace(",", "")) for number in found]


def bars(axes: Axes, rows: list[tuple[str, float, str, str]]) -> None:
    """A bar for each (name, length, label, colour), the first one on top."""
    most = max(length for _, length, _, _ in rows)
    for place, (name, length, label, colour) in enumerate(rows):
        axes.barh(-place, length, 0.5, color=colour)
        axes.text(0, -place + 0.36, name, color=INK, fontsize=9)
        axes.text(length + 0.02 * most, -place, label, va="center", color=colour, fontweight="bold")
    axes.set_xlim(0, 1.3 * most)
    axes.set_ylim(-len(rows) + 0.4, 0.8)


def equal_decodes(axes: Axes, ours: str, otherwise: str) -> None:
    reused, (plain, _, _, fresh, _, _, decodes) = numbers(ours), numbers(otherwise)
    accuracy, _, _, spent = reused
    bars(axes, [
        (f"with reuse, {spent:,.0f} decodes", accuracy, f"{accuracy:g} %", OURS),
        (f"without, {spent:,.0f} decodes", plain, f"{plain:g} %", OTHERWISE),
        (f"without, {decodes:,.0f} decodes", fresh, f"{fresh:g} %", OTHERWISE),
    ])  # fmt: skip


def does_not_fit(axes: Axes, ours: str, _: str) -> None:
    limit = numbers(ours)[0]
    axes.text(0, 0.85, f"limit of memory: {limit:,.0f} MiB", color=INK, fontsize=9)
    axes.text(0, 0.62, "OffloadStrategy trains", color=OURS, fontweight="bold", fontsize=12)
    axes.text(0, 0.50, "losses equal to the last bit", color=OURS, fontsize=9)
    axes.text(0, 0.22, "plain Lightning dies", color=OTHERWISE, fontweight="bold", fontsize=12)


def killed(axes: Axes, ours: str, _: str) -> None:
    equal, every = (int(number) for number in numbers(ours)[:2])
    across = 14
    for place in range(every):
        colour = OURS if place < equal else OTHERWISE
        axes.plot(place % across, -(place // across), "s", color=colour, markersize=9)
    axes.set_xlim(-0.7, across)
    axes.set_ylim(-every / across - 1.6, 1.2)
    axes.text(
        -0.5,
        -every / across - 1.2,
        f"{equal} of {every} tensors are equal after kill -9",
        color=OURS,
    )


def four_rates(axes: Axes, ours: str, otherwise: str) -> None:
    together, alone = numbers(ours)[0], numbers(otherwise)[0]
    bars(axes, [
        ("together; the worse ones stop early", together, f"{together:g} s", OURS),
        ("one after another", alone, f"{alone:g} s", OTHERWISE),
    ])  # fmt: skip


def main() -> None:
    told = json.loads(SOURCE.read_text(encoding="utf-8"))
    told.pop("measured")
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    figure.get_layout_engine().set(hspace=0.12, wspace=0.05)  # type: ignore[union-attr]
    drawn = (equal_decodes, does_not_fit, killed, four_rates)
    for axes, draw, (promise, row) in zip(
        figure.subplots(2, 2).flat, drawn, told.items(), strict=True
    ):
        draw(axes, row["ours"], row["otherwise"])
        axes.set_title(promise, loc="left", fontsize=12, fontweight="bold", color=INK)
        axes.axis("off")
    figure.savefig(TARGET, dpi=110)


if __name__ == "__main__":
    main()
