"""report.html: one run in a page that needs nothing else, made from what its folder holds.

    run.json, metrics.csv --read_run--> Run --sections--> page --> report.html
    config.yaml ----------------------------------^

A page has no script and needs no network; its figures (perfect/plots.py) are part of it. What is
missing is left out or said in a sentence: a run that was interrupted, has no validation or one row
of metrics has a report too. What a user may have written is escaped: a table's cell is text unless
it is `Html`. Decodes saved are counted against decoding at every serve; those made twice (after a
resume) count as work.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import yaml

from perfect import plots
from perfect.plots import Metrics, Slopes, Story, read_metrics

DASH = "\N{EN DASH}"
STATUSES = ("completed", "running", "interrupted", "failed")
KINDS = MappingProxyType({"number": (int, float), "list": (list,), "mapping": (dict,)})
SHAPE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("accuracy", "best_accuracy", "steps", "wall_seconds", "train_seconds",
             "stall_seconds", "serve_seconds", "decoded_samples", "extra_decodes",
             "served_samples", "buffer_bytes", "fresh_passes", "train_samples"), "number"),
        **dict.fromkeys(("phases", "switches", "trace", "resumed_at"), "list"),
        **dict.fromkeys(("environment", "config"), "mapping"),
    }
)  # fmt: skip


# ---- reading ------------------------------------------------------------------------------------


class RunError(ValueError):
    """A folder that is no run, or a run that cannot be read: `what; what to do`."""


@final
@dataclass(frozen=True, slots=True)
class Run:
    """What a run left behind. Figures are None where the run did not get as far."""

    folder: Path
    record: Mapping[str, Any]  # run.json: read_run checked the kinds of its values
    metrics: Metrics

    @property
    def name(self) -> str:
        return str(self.record.get("name") or self.folder.name)

    @property
    def status(self) -> str:
        return self.record["status"]

    def number(self, key: str) -> float | None:
        value = self.record.get(key)
        return value if value is not None and math.isfinite(value) else None

    def rows(self, key: str) -> list[dict[str, Any]]:  # Any: rows of run.json
        return self.record.get(key) or []

    def table(self, key: str) -> dict[str, Any]:  # Any: a part of run.json
        return self.record.get(key) or {}

    @property
    def decodes(self) -> float | None:
        """All of them: for first serves, and again after a resume."""
        decoded = self.number("decoded_samples")
        return None if decoded is None else decoded + (self.number("extra_decodes") or 0)

    @property
    def saved(self) -> float | None:
        """The share of serves that needed no decode."""
        served, decodes = self.number("served_samples"), self.decodes
        return 1 - decodes / served if served and decodes is not None else None

    @property
    def fresh_passes(self) -> float | None:
        fresh = self.number("fresh_passes")
        return self.in_passes("decoded_samples") if fresh is None else fresh

    def in_passes(self, key: str) -> float | None:
        """A number of samples, in passes through the training set."""
        samples, size = self.number(key), self.number("train_samples")
        return samples / size if samples is not None and size else None

    @property
    def busy_seconds(self) -> float | None:
        """The training itself: what the stall is a share of."""
        return self.number("train_seconds") or self.number("wall_seconds")

    @property
    def stall_share(self) -> float | None:
        stall, busy = self.number("stall_seconds"), self.busy_seconds
        return stall / busy if stall is not None and busy else None


def read_run(folder: Path) -> Run:
    """Reads a run folder, or says what is wrong with it (RunError)."""
    path = folder / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = "holds no run.json" if folder.is_dir() else "is no folder"
        raise RunError(f"{what}; give the folder of a run, as perfect-train made it") from None
    except OSError as error:
        raise RunError(f"run.json: {error.strerror}; make it readable") from error
    except ValueError as error:
        raise RunError(f"run.json is damaged ({error}); delete it and run again") from error
    if problems := _problems(record):
        raise RunError(f"run.json is damaged ({', '.join(problems)}); delete it and run again")
    try:
        metrics = read_metrics(folder / "metrics.csv")
    except FileNotFoundError:
        metrics = Metrics({})
    except (OSError, ValueError) as error:
        raise RunError(f"metrics.csv cannot be read ({error}); repair or remove it") from error
    return Run(folder, record, metrics)


def _problems(record: object) -> list[str]:
    if not isinstance(record, dict):
        return ["it is no object"]
    found = []
    if record.get("status") not in STATUSES:
        found.append(f"status is {record.get('status')!r}, not one of {', '.join(STATUSES)}")
    for key, kind in SHAPE.items():
        value = record.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, KINDS[kind])):
            found.append(f"{key} is {str(value)[:40]!r}, not a {kind}")
    for key, needed in (
        ("phases", ("name", "reuse", "first_step", "last_step")),
        ("switches", ("step", "reason")),
        ("trace", ("seen",)),
    ):
        rows = record.get(key)
        for i, row in enumerate(rows if isinstance(rows, list) else ()):
            missing = [n for n in needed if not isinstance(row, dict) or row.get(n) is None]
            if missing:
                found.append(f"{key}[{i}] lacks {' and '.join(missing)}")
    return found


# ---- words --------------------------------------------------------------------------------------


def percent(share: float | None, digits: int = 1) -> str:
    # + 0.0: no minus before a zero.
    return DASH if share is None else f"{round(100 * share, digits) + 0.0:.{digits}f} %"


def count(number: float | None) -> str:
    if number is None:
        return DASH
    return f"{number:,.0f}" if abs(number) >= 10_000 else f"{number:.0f}"


def passes(number: float | None) -> str:
    if number is None:
        return DASH
    return _round(number) if number >= 1 or not number else f"{number:.2g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    if seconds < 120:
        return f"{_round(seconds)} s"
    if seconds < 7200:
        return f"{_round(seconds / 60)} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


def _round(number: float) -> str:
    """To one digit after the point, none if it is a zero."""
    return f"{number:.1f}".removesuffix(".0")


def fewer(saved: float | None) -> str:
    """Decodes saved, in words."""
    if saved is None:
        return "nothing served yet"
    if abs(saved) < 0.0005:
        return "no decodes saved"
    return f"{_round(abs(100 * saved))} % {'fewer' if saved > 0 else 'more'} decodes"


def summary(run: Run) -> str:
    """The run in one sentence."""
    steps = f"{count(run.number('steps') or 0)} steps"
    accuracy, best = run.number("accuracy"), run.number("best_accuracy")
    if accuracy is not None:
        said = f"{percent(accuracy)} {_accuracy_on(run)} after {steps}"
    elif best is not None:
        said = f"{percent(best)} best hold-out accuracy in {steps}"
    else:
        said = f"{steps} without a measured accuracy"
    if run.status != "completed":
        said = f"{run.status}: {said}"
    parts = [said]
    if run.fresh_passes is not None and run.number("served_samples"):
        extra = run.number("extra_decodes")
        again = f" (and {count(extra)} samples decoded again)" if extra else ""
        fresh = passes(run.fresh_passes)
        parts.append(
            f"{fresh} fresh {'pass' if fresh == '1' else 'passes'} decoded{again}"
            f" for {passes(run.in_passes('served_samples'))} served: {fewer(run.saved)}"
        )
    if run.stall_share is not None:
        stall = duration(run.number("stall_seconds"))
        parts.append(f"{stall} of {duration(run.busy_seconds)} waiting for decoding")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _accuracy_on(run: Run) -> str:
    kinds = {"test": "test accuracy", "holdout": "hold-out accuracy"}
    return kinds.get(run.record.get("accuracy_on") or "", "accuracy")


# ---- the page -----------------------------------------------------------------------------------


class Html(str):
    """Text that is HTML already: not escaped again."""


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], words: Sequence[int] = (0,)
) -> str:
    """An HTML table; the columns `words` are set left, the others as numbers."""

    def line(tag: str, cells: Sequence[object]) -> str:
        kinds = ("" if i in words else " class=n" for i in range(len(cells)))
        texts = (cell if isinstance(cell, Html) else escape(str(cell)) for cell in cells)
        made = (f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    top = f"<thead>{line('th', head)}</thead>" if head else ""
    body = "\n".join(line("td", row) for row in rows)
    return f"<div class=wide><table>{top}<tbody>\n{body}\n</tbody></table></div>"


def section(title: str, *content: str | None) -> str:
    """A heading and what follows; nothing if nothing follows."""
    inside = "\n".join(part for part in content if part)
    return f"<section><h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def plot(svg: str | None, caption: str = "") -> str | None:
    told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return svg and f"<figure>{svg}{told}</figure>"


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
figure { margin: 0; break-inside: avoid }
svg { display: block; width: 100%; height: auto }
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
@media print { main { padding: 0; max-width: none } body { font-size: 12px } @page { margin: 16mm }
  .wide { overflow: visible } }
"""


# ---- the report ---------------------------------------------------------------------------------


def write_report(run_dir: Path) -> Path:
    """Writes report.html into a run folder (RunError if it is none)."""
    run = read_run(run_dir)
    story = Story.of(run.rows("phases"), run.rows("switches"))
    logged = run.metrics.columns.get("step", ())
    steps = max([run.number("steps") or 0, *logged, *(span.end for span in story.spans)])
    tested = run.number("accuracy") if run.record.get("accuracy_on") == "test" else None
    parts = [
        _alerts(run),
        _key_figures(run),
        section(
            "Accuracy and loss",
            plot(plots.learning_curves(run.metrics, story, steps, tested), _switches_told(run))
            or note("Neither accuracy nor loss was logged."),
        ),
        section(
            "Learning rate",
            plot(plots.learning_rate(run.metrics, story, steps))
            or note("No learning rate was logged."),
        ),
        section(
            "Decode, serve, stall",
            plot(
                plots.input_pipeline(run.metrics, story),
                "Means between rows of metrics.csv. Where served runs above decoded, samples are"
                " reused; both fall while the run validates.",
            )
            or note("Rates need two rows of metrics at different times."),
        ),
        _plateau(run),
        _phases(run),
        _decodes(run),
        section("Environment", _environment(run)),
        section("Configuration", _config(run)),
    ]
    path = run_dir / "report.html"
    path.write_text(page(run.name, summary(run), parts), encoding="utf-8")
    return path


def _alerts(run: Run) -> str:
    steps, error = count(run.number("steps") or 0), run.record.get("error")
    text = {
        "completed": "",
        "running": f"This run is still going, at step {steps}; the figures are those so far.",
        "interrupted": f"Interrupted after {steps} steps. The same command resumes it.",
        "failed": f"Failed after {steps} steps.",
    }[run.status]
    text = "\n".join(str(part) for part in (text, error) if part)
    resumed = ", ".join(map(str, run.record.get("resumed_at") or ()))
    said = f"<p class=alert>{escape(text)}</p>" if text else ""
    return said + (note(f"Resumed at step {resumed}.") if resumed else "")


def _key_figures(run: Run) -> str:
    label = _accuracy_on(run)
    figures = [
        (percent(run.number("accuracy"), 2), label[0].upper() + label[1:]),
        (percent(run.number("best_accuracy"), 2), "Best on hold-out"),
        (count(run.number("steps")), "Optimizer steps"),
        (duration(run.number("wall_seconds")), "Wall time"),
        (passes(run.fresh_passes), "Fresh passes"),
        (percent(run.saved), "Decodes saved"),
        (percent(run.stall_share), "Stall share"),
    ]
    cells = (f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for value, name in figures)
    return f"<dl>{''.join(cells)}</dl>"


def _switches_told(run: Run) -> str:
    reused = any(phase["reuse"] > 1 for phase in run.rows("phases"))
    told = "Shaded: samples are reused, the darker the more often." if reused else ""
    for switch in run.rows("switches"):
        if switch.get("entered") is not None:
            told += (
                f" Switch to {switch['entered']} at step {switch['step']}"
                f" (epoch {switch.get('at', math.nan):.1f}): {switch['reason']};"
                f" {switch.get('detail', '')}."
            )
    return told.strip()


def _plateau(run: Run) -> str:
    verdicts = [look["verdict"] for look in run.rows("trace") if look.get("verdict")]
    if not verdicts:
        return ""
    rule = run.table("config").get("switch") or {}
    checks = [
        Slopes(v["at"], v.get("accuracy_slope"), v.get("loss_slope"), bool(v.get("fired")))
        for v in verdicts
    ]
    svg = plots.plateau_trace(checks, rule.get("accuracy_slope"), rule.get("loss_slope"))
    hits = f" {rule['hits']} checks running must be flat." if rule.get("hits") else ""
    told = (
        f"Slopes over a window of checks, under a constant learning rate.{hits} A diamond is where"
        " the rule fired. Linear within the threshold, logarithmic beyond it."
    )
    last = f"The window never filled: no slopes. Last check: {verdicts[-1].get('reason', '')}."
    return section("Plateau", plot(svg, told) or note(last))


def _phases(run: Run) -> str:
    head = ("Phase", "Reuse", "Passes", "Steps", "Decoded", "Learning rate", "Ended because")
    rows = [
        (
            p["name"],
            p["reuse"],
            p.get("passes", DASH),
            f"{p['first_step']}{DASH}{p['last_step']}",
            count(p.get("decoded")),
            " \N{RIGHTWARDS ARROW} ".join(
                DASH if lr is None else f"{lr:.3g}" for lr in (p.get("lr_start"), p.get("lr_end"))
            ),
            p.get("reason") or DASH,
        )
        for p in run.rows("phases")
    ]
    return section("Phases", table(head, rows, words=(0, 6)) if rows else note("None began."))


def _decodes(run: Run) -> str:
    served, decodes = run.number("served_samples"), run.decodes
    decoded, extra = run.number("decoded_samples"), run.number("extra_decodes") or 0
    if not served or decodes is None or decoded is None:
        return section("Decodes saved", note("Nothing was served."))
    epoch = run.number("train_samples")

    def line(name: str, samples: float) -> tuple[str, ...]:
        share = passes(samples / epoch) if epoch else DASH
        return name, count(samples), share, percent(samples / served)

    rows = [
        line("Served: what decoding at every serve would take", served),
        line("Decoded for a first serve", decoded),
        line("Decoded beyond that (after a resume, or ahead of an end)", extra),
        line("Saved", served - decodes),
    ]
    full = max(served, decodes)
    bar = f"<i style='width:{100 * decoded / full:.2f}%'></i>"
    bar += f"<i style='width:{100 * extra / full:.2f}%'></i>" if extra else ""
    return section(
        "Decodes saved",
        f"<div class=bar>{bar}</div>",
        table(("", "Samples", "Passes", "Of served"), rows),
        note(
            f"The reuse buffer took {(run.number('buffer_bytes') or 0) / 2**20:.3g} MiB; putting"
            f" batches together took {duration(run.number('serve_seconds'))}."
        ),
    )


def _environment(run: Run) -> str | None:
    found = {**run.table("environment"), "seed": run.record.get("seed")}
    rows = [(key, value) for key, value in found.items() if value is not None]
    return table((), rows, words=(0, 1)) if rows else None


def _config(run: Run) -> str | None:
    path = run.folder / "config.yaml"
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        text = yaml.safe_dump(run.table("config"), sort_keys=False) if run.table("config") else ""
    return f"<pre>{escape(text.strip())}</pre>" if text.strip() else None
