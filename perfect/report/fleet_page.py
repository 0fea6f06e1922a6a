"""Writes report.html of a grid: its jobs, best first, their curves, and who waited for what.

    grid.json, timeline.jsonl, jobs/NAME/* --read_fleet--> FleetRecord --> page --> report.html

Like the page of a run it needs no scripts, no network and no other files. The links lead to the
jobs' own pages.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from perfect.report import words
from perfect.report.curves import KEY_CSS, line_key
from perfect.report.fleet_figures import (
    MOST_LINE_STYLES,
    ON_DEVICE,
    PHASE_STYLES,
    metric_figure,
    timeline_figure,
)
from perfect.report.fleet_record import STATES, FleetRecord, JobRecord, read_fleet
from perfect.report.page import Html, note, page, plot, section, table
from perfect.report.words import DASH, count, duration, legible, percent

CSS = """
td .line { vertical-align: middle } th.n { white-space: normal }
.job { white-space: nowrap } .job wbr { white-space: normal }
"""
"""A job's name is broken after a comma, and not at the hyphen of 1e-3."""


def write_fleet_page(folder: Path) -> Path:
    """Write report.html into the folder of a grid. Raise RunError if it holds none."""
    fleet = read_fleet(folder)
    path = folder / "report.html"
    path.write_text(fleet_page(fleet), encoding="utf-8")
    return path


def fleet_page(fleet: FleetRecord) -> str:
    """Return the page as HTML."""
    parts = [
        f"<style>{CSS}{KEY_CSS}</style>",
        _alerts(fleet),
        section(
            "Jobs, best first",
            _jobs(fleet),
            note(
                f"The best job has the {'lowest' if fleet.mode == 'min' else 'highest'}"
                f" {fleet.metric}, as it was last logged in training. Jobs without a number come"
                " last. A name leads to the page of that job."
            ),
        ),
        section(
            fleet.metric,
            plot(metric_figure(fleet), _curves_caption(fleet))
            or note(f"No job has logged {fleet.metric}."),
        ),
        section(
            "What every device and every job did",
            plot(
                timeline_figure(fleet),
                "The height of a colour is its share of the time there. Devices show what jobs did"
                " that had them to themselves."
                + (" The program began again at a dashed line." if fleet.restarts else ""),
            )
            or note("No job has begun."),
        ),
        section("Who waited for what", _waits(fleet)),
        section("Settings of the fleet", _settings(fleet)),
    ]
    return page(f"Grid {legible(fleet.folder.resolve().name)}", summary(fleet), parts)


def summary(fleet: FleetRecord) -> str:
    """Return what came of the grid in one sentence."""
    counts = {state: sum(job.state == state for job in fleet.jobs) for state in STATES}
    rest = len(fleet.jobs) - sum(counts.values())
    told = [f"{number} {state}" for state, number in counts.items() if number]
    told += [f"{rest} not at their end"] if rest else []
    jobs = f"{words.counted(len(fleet.jobs), 'job')} ({', '.join(told)})"
    took = f"{duration(fleet.seconds)} on {words.counted(len(fleet.devices), 'device')}"
    best = fleet.best
    if best is None:
        return f"{jobs} in {took}. No job has finished with a {fleet.metric}."
    judged = _judged(best)
    more = f" ({', '.join(judged)})" if judged else ""
    return f'"{best.name}" is best: {fleet.metric} {best.metric:.5g}{more}. {jobs} in {took}.'


def _judged(job: JobRecord) -> list[str]:
    """Say how good the final weights of a job are."""
    said = []
    if job.run is not None:
        if (accuracy := job.run.number("accuracy")) is not None:
            said.append(f"{job.run.record.get('accuracy_on')} accuracy {words.accuracy(accuracy)}")
        if (perplexity := job.run.number("perplexity")) is not None:
            said.append(f"{job.run.record.get('perplexity_on')} perplexity {perplexity:.4g}")
    return said


def _alerts(fleet: FleetRecord) -> str:
    said = [
        f"{job.name} failed after {words.counted(job.step, 'step')}:"
        f" {job.why or 'no reason is known'}"
        for job in fleet.jobs
        if job.state == "failed"
    ]
    if fleet.status == "interrupted":
        said.append("The grid was interrupted. The same command goes on with it.")
    if fleet.status == "out of time":
        said.append("Its time was over. The same command goes on with it for as long again.")
    text = "\n".join(said)
    return f"<p class=alert>{escape(text)}</p>" if text else ""


def _jobs(fleet: FleetRecord) -> str:
    accuracy, perplexity = (
        any(job.run is not None and job.run.number(key) is not None for job in fleet.jobs)
        for key in ("accuracy", "perplexity")
    )
    head = ["", "Job", *fleet.axes, fleet.metric]
    head += ["Accuracy"] * accuracy + ["Perplexity"] * perplexity
    head += ["Steps", "On device", "State"]
    rows = []
    for number, job in enumerate(fleet.jobs):
        cells: list[object] = [number + 1, _name(number, job)]
        cells += [_value(job.settings.get(axis)) for axis in fleet.axes]
        cells.append(DASH if job.metric is None else f"{job.metric:.5g}")
        found = job.run
        if accuracy:
            cells.append(words.accuracy(found.number("accuracy")) if found else DASH)
        if perplexity:
            figure = found.number("perplexity") if found else None
            cells.append(DASH if figure is None else f"{figure:.4g}")
        why = f": {job.why}" if job.why and job.state in ("stopped", "failed") else ""
        cells += [count(job.step), words.seconds(job.seconds), f"{job.state}{why}"]
        rows.append(cells)
    return table(head, rows, words=(1, len(head) - 1))


def _name(number: int, job: JobRecord) -> Html:
    line, name = line_key(number, "") if number < MOST_LINE_STYLES else "", _breakable(job.name)
    if job.run is not None:
        name = f"<a href='{quote(job.folder)}/report.html'>{name}</a>"
    return Html(f"<span class=job>{line}{name}</span>")


def _breakable(name: str) -> str:
    return escape(name).replace(",", ",<wbr>")


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else DASH if value is None else str(value)


def _curves_caption(fleet: FleetRecord) -> str:
    said = "A dot is the end of a job, a cross the end of one that was stopped early."
    if fleet.fleet.get("stop"):
        said += " Dashed lines are the rungs at which jobs were judged."
    return said


def _waits(fleet: FleetRecord) -> str | None:
    """Return the seconds that each job spent in each phase."""
    jobs = [job for job in fleet.jobs if job.spans]
    seen = {span.phase for job in jobs for span in job.spans}
    phases = [phase for phase in PHASE_STYLES if phase in seen]
    if not jobs:
        return None

    def line(name: object, of: Sequence[JobRecord]) -> list[object]:
        spent = [
            sum(s.end - s.begin for job in of for s in job.spans if s.phase == phase)
            for phase in phases
        ]
        return [name, *(words.seconds(seconds) if seconds else DASH for seconds in spent)]

    works = sum(s.end - s.begin for job in jobs for s in job.spans if s.phase in ON_DEVICE)
    whole = fleet.seconds * len(fleet.devices)
    busy = percent(works / whole) if whole else DASH
    return table(
        ("", *(PHASE_STYLES[phase][0].capitalize() for phase in phases)),
        [
            *(line(Html(f"<span class=job>{_breakable(job.name)}</span>"), [job]) for job in jobs),
            line("All jobs", jobs),
        ],
    ) + note(f"Jobs had the devices for {busy} of the time.")


def _settings(fleet: FleetRecord) -> str:
    rows = []
    for key, value in fleet.fleet.items():
        if isinstance(value, dict):
            rows += [(f"{key}.{inner}", part) for inner, part in value.items() if part is not None]
        elif value is not None:
            rows.append((key, value))
    return table((), rows, words=(0, 1))
