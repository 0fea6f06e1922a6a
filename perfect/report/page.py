"""Makes an HTML page that needs no scripts, no network and no other files.

These functions take text and escape it, once, because a user may have written it. A table's cell is
text unless it is `Html`; code that makes an `Html` of its own escapes the text in it. A section
without content has no heading.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already, and is not escaped again."""


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], words: Sequence[int] = (0,)
) -> str:
    """Return an HTML table. The columns `words` are aligned left, the others as numbers."""
    names = [re.sub("<.*?>", "", cell) if isinstance(cell, Html) else escape(str(cell))
             for cell in head]  # fmt: skip
    of = [f' data-of="{name}"' if name else "" for name in names]

    def line(tag: str, cells: Sequence[object], of: Sequence[str] = ()) -> str:
        kinds = ("" if i in words else " class=n" for i in range(len(cells)))
        texts = (cell if isinstance(cell, Html) else escape(str(cell)) for cell in cells)
        made = (
            f"<{tag}{kind}{name}>{text}</{tag}>"
            for kind, name, text in zip(kinds, of or [""] * len(cells), texts, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    top = f"<thead>{line('th', head)}</thead>" if head else ""
    body = "\n".join(line("td", row, of) for row in rows)
    kind = " class=headed" if head else ""
    return f"<div class=wide><table{kind}>{top}<tbody>\n{body}\n</tbody></table></div>"


def section(title: str, *content: str | None) -> str:
    """Return a heading with its content; nothing if there is no content."""
    inside = "\n".join(part for part in content if part)
    return f"<section><h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def plot(svg: str | None, caption: str = "", broad: bool = False) -> str | None:
    """Return a figure with its caption. A `broad` one is wider than the text if there is room."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    kind = " class=broad" if broad else ""
    return svg and f"<figure{kind}><div class=wide>{svg}</div>{below}</figure>"


def note(text: str) -> str:
    return f"<p class=note>{escape(text)}</p>"


def page(title: str, lead: str, parts: Iterable[str]) -> str:
    lead = lead.replace(" %", "\N{NO-BREAK SPACE}%")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style></head>
<body><main>
<h1>{escape(title)}</h1>
<p class=lead>{escape(lead)}</p>
{chr(10).join(part for part in parts if part)}
</main></body></html>
"""


CSS = """
:root { color-scheme: light; --ink: #1f2933; --muted: #5c6773; --rule: #dde2e7 }
* { box-sizing: border-box; overflow-wrap: break-word }
body { margin: 0; background: #fff; color: var(--ink); font: 15px/1.5 system-ui, -apple-system,
  "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-variant-numeric: tabular-nums }
main { max-width: 960px; margin: 0 auto; padding: 40px 24px 64px }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 10px; letter-spacing: -.01em }
h2 { font-size: 17px; margin: 40px 0 12px; break-after: avoid }
.lead { font-size: 18px; line-height: 1.45; margin: 0; max-width: 46em; text-wrap: pretty }
.note, figcaption { color: var(--muted); font-size: 13px; margin: 6px 0 0 }
.alert { border-left: 4px solid #d55e00; background: #fdf4ee; padding: 10px 14px; margin: 20px 0 0;
  white-space: pre-wrap }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(126px, 1fr)); gap: 1px;
  margin: 26px 0 0; background: var(--rule); border: solid var(--rule); border-width: 1px 0 }
dl div { background: #fff; padding: 12px 8px 12px 14px; display: flex; flex-direction: column }
dl div:first-child { padding-left: 0 }
dt { color: var(--muted); font-size: 12.5px; order: 1 }
dd { margin: 0; font-size: 21px; font-weight: 600; letter-spacing: -.01em; white-space: nowrap }
figure { margin: 0 0 10px; break-inside: avoid }
.broad { margin: 24px 0 0 }
@media screen and (min-width: 1120px) { .broad { margin: 24px -80px 0 }
  .broad figcaption { margin-left: 80px } }
svg, img { display: block; width: 100%; height: auto }
figure svg * { stroke-linejoin: round; stroke-linecap: butt }
figure svg text { font-family: inherit !important }
table { border-collapse: collapse; width: 100%; font-size: 13.5px }
th { text-align: left; color: var(--muted); font-weight: 500; vertical-align: bottom }
td, th { border-bottom: 1px solid var(--rule); padding: 6px 18px 6px 0; vertical-align: top }
th:last-child, td:last-child { padding-right: 0 }
.n { text-align: right; white-space: nowrap }
tr { break-inside: avoid }
.bar { display: flex; height: 12px; margin: 4px 0 14px; background: #d9e8f2;
  print-color-adjust: exact; -webkit-print-color-adjust: exact }
.bar i { background: #0072b2 } .bar i + i { background: #d55e00 }
pre { background: #f5f7f9; border-radius: 4px; padding: 14px 16px; margin: 0; white-space: pre-wrap;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace }
.wide { overflow-x: auto }
@media screen and (max-width: 700px) {
  main { padding: 24px 16px 48px } h1 { font-size: 24px } .lead { font-size: 16px }
  figure svg, img { min-width: 800px }
  .headed, .headed tbody { display: block } .headed thead { display: none }
  .headed tr { display: block; border-bottom: 1px solid var(--rule); padding: 8px 0 }
  .headed td { display: flex; justify-content: space-between; gap: 20px; border: 0; padding: 1px 0;
    text-align: right; white-space: normal; overflow-wrap: anywhere }
  .headed td:first-child { font-weight: 600; text-align: left }
  .headed td[data-of]::before { content: attr(data-of); color: var(--muted); font-weight: 400;
    text-align: left; flex-shrink: 0; max-width: 55% } }
@media print { main { padding: 0; max-width: none } body { font-size: 12px } @page { margin: 16mm }
  .wide { overflow: visible } }
"""
