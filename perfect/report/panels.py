"""Makes panels to draw in, all in one style, and turns them into SVG text.

Margins are the same in every figure, so figures below one another line up. Figures are made through
`Figure`, never pyplot, and styled inside one `rc_context`, so no global state changes. The colours
are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations  # matplotlib takes a second to import, and --help needs none

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perfect.report.page import Html
from perfect.report.results import Column, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, INK, MUTED, RULE = (
    "#0072B2", "#D55E00", "#009E73", "#1f2933", "#66717e", "#c9d0d8",
)  # fmt: skip
WIDTH = 9.4
MARGIN_LEFT, MARGIN_RIGHT = 0.52, 0.12  # inches: the same in all figures, so that they line up
STYLE: Mapping[Any, Any] = MappingProxyType(  # Any: matplotlib's settings have every type
    {
        "svg.fonttype": "none", "svg.hashsalt": "perfect", "font.family": "sans-serif",
        "font.size": 9.0, "text.color": INK, "text.usetex": False, "axes.edgecolor": RULE,
        "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
        "axes.labelcolor": MUTED, "axes.labelsize": 9.0, "axes.grid": True, "axes.grid.axis": "y",
        "axes.axisbelow": True, "grid.color": "#e4e8ec", "grid.linewidth": 0.7,
        "xtick.color": RULE, "ytick.color": RULE, "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED, "ytick.major.size": 0.0, "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round", "figure.facecolor": "none", "axes.facecolor": "none",
        "savefig.facecolor": "none", "axes.xmargin": 0.0,
    }
)  # fmt: skip


@contextmanager
def panels(
    heights: Sequence[float], gap: float = 0.0, top: float = 0.3, columns: int = 1
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure in our style, with rows of `columns` panels. Heights are in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    bottom, between = 0.42, 0.22
    height = sum(heights) + gap * (len(heights) - 1) + top + bottom
    width = (WIDTH - MARGIN_LEFT - MARGIN_RIGHT - between * (columns - 1)) / columns
    with matplotlib.rc_context(dict(STYLE)), warnings.catch_warnings():
        # The reader's browser draws the text, so a glyph that is missing here does no harm.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(WIDTH, height))
        axes, y = [], height - top
        for tall in heights:
            y -= tall
            for column in range(columns):
                x = MARGIN_LEFT + column * (width + between)
                box = (x / WIDTH, y / height, width / WIDTH, tall / height)
                axes.append(figure.add_axes(box))
            y -= gap
        for panel in axes[: -columns or None]:
            panel.tick_params(labelbottom=False)
        yield figure, axes


def draw_line(
    axes: Axes, x: Column, y: Column, colour: str, dots: bool = True, dashes: tuple[float, ...] = ()
) -> None:
    line = axes.plot(x, y, color=colour)[0]
    if dashes:
        line.set_dashes(dashes)
    if len(x) == 1 or (dots and len(x) <= 60):
        line.set_marker("o")
        line.set_markersize(3.2)


def put_title(
    axes: Axes, text: str, keys: Sequence[tuple[str, str]], above_labels: bool = False
) -> None:
    """Write title and key in one line above the panel, each key in its curve's colour."""
    lift = 19.0 if above_labels else 6.0
    put_text(axes, 0.0, 1.0, text, (0, lift), fontweight="bold", va="bottom")
    # Keys are placed from the right, as their widths in a reader's font are not known here.
    right = 0.0
    for name, colour in reversed(keys):
        swatch = "" if name.startswith(("◆", "not")) else "— "
        put_text(
            axes, 1.0, 1.0, swatch + name, (-right, lift), color=colour, ha="right", va="bottom"
        )
        right += 5.1 * len(swatch + name) + 10


def put_legend(
    figure: Figure, entries: Sequence[tuple[str, str]], height: float, gap: float
) -> None:
    """Write a line of (name, colour) above a figure of this height, in inches."""
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in entries], ncols=len(entries),
        loc="upper left", bbox_to_anchor=(0, 1 - 0.03 / height), frameon=False, borderaxespad=0,
        borderpad=0, handlelength=1.0, handleheight=0.9, columnspacing=gap, labelcolor=INK,
        fontsize=8.5,
    )  # fmt: skip


def put_text(
    axes: Axes, x: float, y: float, text: str, offset: tuple[float, float], **how: Any
) -> None:
    """Write text at a place in fractions of the axes. A $ in a user's name stays a $."""
    axes.annotate(
        text, (x, y), xytext=offset, xycoords="axes fraction", textcoords="offset points",
        parse_math=False, annotation_clip=False, **how,
    )  # fmt: skip


def to_svg(figure: Figure, title: str) -> str:
    """Return the figure as an <svg> element. It is as wide as its container, has no prologue, has
    no ids in common with another figure on the page, and refers to nothing outside."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style type=\"text/css\">.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    box = re.search(r'viewBox="[^"]*"', text)
    head = f'<svg role="img" aria-label="{escape(title)}" {box.group() if box else ""}>'
    return head + text[text.index(">") + 1 :].strip()


COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#4d4d4d")
DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2))


class Curve(NamedTuple):
    """The hold-out accuracy of a run (0 to 1) over a cost, and the point of its final weights."""

    x: Column
    y: Column
    end: tuple[float, float] | None


AXES = (
    ("optimizer step", "step", "steps"),
    ("samples decoded", "decoded", "decoded_samples"),
    ("seconds", "wall_seconds", "wall_seconds"),
)


def curve(run: Run, column: str, total: str) -> Curve:
    """Return accuracy over a column, which is interpolated for rows of validation."""
    steps, accuracy = run.metrics.pairs("step", "val_accuracy")
    known, values = run.metrics.pairs("step", column)
    if not len(known):
        steps, accuracy = steps[:0], accuracy[:0]
    # The curve begins at (0, 0), as nothing is decoded before the first step.
    x = np.interp(steps, np.concatenate([[0.0], known]), np.concatenate([[0.0], values]))
    last, final = run.number(total), run.number("accuracy")
    return Curve(x, accuracy, None if last is None or final is None else (last, final))


def accuracy_figure(runs: Sequence[Run]) -> str | None:
    """Draw panels side by side with one axis of accuracy. Each has a curve for every run."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = [[curve(run, column, total) for run in runs] for _, column, total in AXES]
    if not any(len(x) or end for curves in drawn for x, _, end in curves):
        return None
    with panels([3.2], columns=len(AXES)) as (figure, axes):
        for panel, curves, (label, _, _) in zip(axes, drawn, AXES, strict=True):
            for number, (x, y, end) in enumerate(curves):
                colour, dashes = line_style(number)
                draw_line(panel, x, 100 * y, colour, dots=False, dashes=dashes)
                if end is not None:
                    panel.plot(
                        end[0], 100 * end[1], "D", color=colour, ms=6, mec="white", clip_on=False
                    )
            panel.margins(x=0.03)
            panel.set_xlim(left=0)
            panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            panel.xaxis.set_major_formatter(FuncFormatter(_short))
            panel.set_xlabel(label)
        limits = _accuracy_limits([c for curves in drawn for c in curves])
        for i, panel in enumerate(axes):
            panel.set_ylim(*limits)
            panel.tick_params(labelleft=i == 0)
        put_title(axes[0], "Accuracy, %", [])
        return to_svg(figure, "Accuracy of every run over steps, samples decoded and seconds")


def _accuracy_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the limits of the upper half of the curves, where the runs differ."""
    seen = [100 * value for _, y, end in curves for value in (*y, *(end[1:] if end else ()))]
    ends = [100 * (end[1] if end else y[-1]) for _, y, end in curves if end or len(y)]
    bottom = (min(seen) + min(ends)) / 2
    margin = 0.06 * (max(seen) - bottom) or 1.0
    return bottom - margin, max(seen) + margin


def line_style(number: int) -> tuple[str, tuple[float, ...]]:
    """Return colour and dashes of the run with this number."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _short(value: float, _: int) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


KEY_CSS = """
.key span { margin-right: 22px; white-space: nowrap } .line { display: inline-block; width: 26px;
  height: 10px; margin-right: 7px; vertical-align: baseline }
"""


def line_key(number: int, label: str) -> Html:
    """Return the name of the curve with this number, after a piece of its line."""
    colour, dashes = line_style(number)
    dash = f" stroke-dasharray='{' '.join(f'{d:g}' for d in dashes)}'" if dashes else ""
    line = f"<line x1=0 y1=7 x2=26 y2=7 stroke='{colour}' stroke-width=3{dash} />"
    return Html(f"<svg class=line viewBox='0 0 26 10'>{line}</svg>{escape(label)}")
