"""Draws where the time of training went: one bar per phase, for all the time that it took.

    pretrain                                    12 min      kernels | transfers | input |
    |########################|=====|==|..|           |      planning | everything else
    finetune                                     4 min
    |####################|==========|=|..|           |

The two waiting times, for transfers and for input, stand side by side. Shares are of the phase's
own time, so that a short phase can be read too; its length is printed above its bar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfect.report.panels import BLUE, INK, MUTED, ORANGE, STYLE, WIDTH, put_legend, to_svg
from perfect.report.words import duration, percent

PARTS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "compute_seconds": ("kernels", BLUE, "white"),
        "transfer_seconds": ("waiting for transfers", ORANGE, "white"),
        "input_seconds": ("waiting for input", "#E69F00", INK),
        "planning_seconds": ("capturing and planning", "#8d99a6", "white"),
        "rest": ("everything else", "#dde2e7", INK),
    }
)
"""For each part its name, its colour and the colour of text in it, in the order of the bar."""
TOP, BAR, ROW = 0.34, 0.24, 0.52
"""These heights are in inches."""


@dataclass(frozen=True, slots=True)
class TimeShares:
    """The training time of a phase, or of a whole run."""

    name: str
    seconds: float
    parts: Mapping[str, float]
    """The seconds of each part, by the names of PARTS."""

    @classmethod
    def from_row(
        cls, row: Mapping[str, Any], name: str = ""
    ) -> "TimeShares":  # Any: a row of run.json
        """Read a row. The rest is the time that no other part contains."""
        parts = {key: float(row.get(key) or 0.0) for key in PARTS if key != "rest"}
        seconds = max(float(row.get("seconds") or 0.0), sum(parts.values()))
        parts["rest"] = seconds - sum(parts.values())
        return cls(name or str(row["name"]), seconds, parts)

    def share(self, part: str) -> float | None:
        return self.parts[part] / self.seconds if self.seconds else None


def time_bars(times: Sequence[TimeShares]) -> str | None:
    times = [time for time in times if time.seconds]
    if not times:
        return None
    with matplotlib.rc_context(dict(STYLE)):
        return to_svg(draw_bars(times), "Where the time of training went")


def draw_bars(times: Sequence[TimeShares]) -> Figure:
    """Draw a figure that is as wide as the text, unlike figures with axes."""
    height = TOP + ROW * len(times)
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, ROW * len(times) / height))
    for number, time in enumerate(times):
        _bar(axes, len(times) - 1 - number, time)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, len(times))
    axes.set_axis_off()
    entries = [(name, colour) for name, colour, _ in PARTS.values()]
    put_legend(figure, entries, height, gap=1.8)
    return figure


def _bar(axes: Axes, low: float, time: TimeShares) -> None:
    height = BAR / ROW
    left = 0.0
    for part, (_, colour, ink) in PARTS.items():
        share = time.share(part) or 0.0
        axes.barh(low, share, height, left, align="edge", color=colour, linewidth=0)
        if share >= 0.055:
            axes.annotate(
                percent(share), (left + share / 2, low + height / 2), ha="center", va="center",
                color=ink, fontsize=8.5,
            )  # fmt: skip
        left += share
    at = low + height
    axes.annotate(
        time.name, (0, at), xytext=(0, 3), textcoords="offset points", va="bottom",
        fontweight="bold", parse_math=False,
    )  # fmt: skip
    axes.annotate(
        duration(time.seconds), (1, at), xytext=(0, 3), textcoords="offset points", va="bottom",
        ha="right", color=MUTED,
    )  # fmt: skip
