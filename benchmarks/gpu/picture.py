"""What a part shows beside its tables: bars or lines, a panel a question.

Drawn where matplotlib is installed; without it the report says so and has its tables.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Panel:
    """`bars`: a value a name. `lines`: (x, y) points a name. `limit`: what is asked."""

    title: str
    axis: str
    bars: Mapping[str, float] = field(default_factory=dict)
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    across: str = ""
    """Words at the x axis of lines."""
    limit: float | None = None


def draw(panels: Sequence[Panel], path: Path) -> str:
    """Why there is no picture; empty: there is one."""
    shown = [panel for panel in panels if panel.bars or panel.lines]
    if not shown:
        return "nothing to draw yet"
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: matplotlib is not installed"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [max(2.5, 0.3 * len(panel.bars)) for panel in shown]
    figure = Figure(figsize=(9, sum(rows) + 0.8 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axis, panel in zip(axes, shown, strict=True):
        _one(axis, panel)
    figure.savefig(path, dpi=120)
    return ""


def _one(axis: Any, panel: Panel) -> None:
    axis.set_title(panel.title, fontsize=9, loc="left")
    axis.tick_params(labelsize=7)
    if panel.bars:
        names = list(panel.bars)[::-1]
        axis.barh(names, [panel.bars[name] for name in names], color="#3b6ea5")
        axis.set_xlabel(panel.axis, fontsize=8)
        if panel.limit is not None:
            axis.axvline(panel.limit, color="#b03a2e", linestyle="--", linewidth=1)
        return
    for name, points in panel.lines.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    axis.set_ylabel(panel.axis, fontsize=8)
    axis.set_xlabel(panel.across, fontsize=8)
    axis.legend(fontsize=7)
    if panel.limit is not None:
        axis.axhline(panel.limit, color="#b03a2e", linestyle="--", linewidth=1)
