"""Draws the demo's page, with the pieces of our reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfect.report.page import Html, page, plot, section, table
from perfect.report.panels import STYLE, to_svg

CSS = """figure { margin: 16px 0; max-width: 560px } figure svg { min-width: 0 !important }
table { margin: 0 0 12px }
td:first-child { color: var(--muted); white-space: nowrap }
td + td { width: 100%; overflow-wrap: anywhere }
.held { color: #00694d } .FAILED { color: #d55e00 }"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a promise: a line of the terminal, and a section of the page."""

    promise: str
    ours: str
    otherwise: str
    held: bool
    parts: Sequence[str | None] = ()

    @property
    def verdict(self) -> str:
        return "held" if self.held else "FAILED"


def drawn(title: str, draw: Callable[[Axes], object]) -> str | None:
    """Return a figure of one panel, narrow enough to be read on a phone."""
    with matplotlib.rc_context(dict(STYLE)):
        figure = Figure(figsize=(5.0, 2.6), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
        return plot(to_svg(figure, title))


def write_page(outcomes: Sequence[Outcome], seconds: float, path: Path) -> None:
    held = sum(one.held for one in outcomes)
    lead = f"{held} of {len(outcomes)} promises held in this run, which took {seconds:.0f} seconds."
    sections = [section(one.promise, _lines(one), *one.parts) for one in outcomes]
    whole = page("Four promises", lead, [f"<style>{CSS}</style>", *sections])
    path.write_text(whole, encoding="utf-8")


def _lines(one: Outcome) -> str:
    verdict = Html(f"<b class={one.verdict}>{one.verdict}</b>")
    lines = (("ours", one.ours), ("otherwise", one.otherwise), ("verdict", verdict))
    return table((), lines, words=(0, 1))
