"""Puts a sample of a curve's line before its name, in a page's text."""

from html import escape

from perfect.report.curves import line_style
from perfect.report.page import Html

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
