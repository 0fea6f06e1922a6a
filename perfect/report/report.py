"""Writes report.html, the page of one run, from the files in its folder.

run.json, metrics.csv --read_run--> Run --sections--> page --> report.html
config.yaml ----------------------------^
"""

import math
from html import escape
from pathlib import Path

import yaml

from perfect.report import plots, words
from perfect.report.offloading import memory_section, stalls_section, steps_section, swarm_section
from perfect.report.page import note, page, plot, section, table
from perfect.report.plots import RunPhases
from perfect.report.results import Run, read_run
from perfect.report.words import DASH, count, duration, fewer, passes, percent, size


def write_report(run_dir: Path) -> Path:
    """Write report.html into a run folder. Raise RunError if the folder holds no run."""
    run = read_run(run_dir)
    run_phases = RunPhases.from_rows(run.rows("phases"), run.rows("switches"))
    logged = run.metrics.columns.get("step", ())
    steps = max([run.number("steps") or 0, *logged, *(span.end for span in run_phases.spans)])
    tested = run.number("accuracy") if run.record.get("accuracy_on") == "test" else None
    environment = {**run.table("environment"), "seed": run.record.get("seed")}
    environment = [pair for pair in environment.items() if pair[1] is not None]
    parts = [
        _alerts(run),
        _key_figures(run),
        section(
            "Accuracy and loss",
            plot(
                plots.learning_curves(run.metrics, run_phases, steps, tested),
                _switches_caption(run),
            )
            or note("Neither accuracy nor loss was logged."),
        ),
        section(
            "Learning rate",
            plot(plots.learning_rate(run.metrics, run.rows("phases"), run_phases, steps))
            or note("No learning rate was logged."),
        ),
        swarm_section(run),
        stalls_section(run),
        memory_section(run),
        steps_section(run),
        section(
            "Decode, serve, stall",
            plot(
                plots.input_pipeline(run.metrics, run_phases),
                "The curves are means between rows of metrics.csv. Where more is served than"
                " decoded, samples are reused. Both fall while the run validates.",
            )
            or note("Rates need two rows of metrics at different times."),
        ),
        _plateau(run),
        _phases(run),
        _decodes(run),
        section("Environment", table((), environment, words=(0, 1)) if environment else None),
        section("Configuration", _config(run)),
    ]
    path = run_dir / "report.html"
    path.write_text(page(run.name, summary(run), parts), encoding="utf-8")
    return path


def summary(run: Run) -> str:
    """Return the run in one sentence."""
    steps = words.counted(run.number("steps") or 0, "step")
    accuracy, best = run.number("accuracy"), run.number("best_accuracy")
    if accuracy is not None:
        outcome = f"{words.accuracy(accuracy)} {_judged_set(run, 'accuracy')} after {steps}"
    elif best is not None:
        outcome = f"{words.accuracy(best)} best hold-out accuracy in {steps}"
    elif (perplexity := run.number("perplexity")) is not None:
        outcome = f"{_judged_set(run, 'perplexity')} {perplexity:.2f} a token after {steps}"
    else:
        outcome = f"{steps} without a measured accuracy"
    if not run.completed:
        outcome = f"{run.status}: {outcome}"
    parts = [outcome]
    if run.fresh_passes is not None and run.number("served_samples"):
        extra = run.number("extra_decodes")
        again = f" (and {count(extra)} samples decoded again)" if extra else ""
        fresh = passes(run.fresh_passes)
        fresh_passes = f"{fresh} fresh {'pass' if fresh == '1' else 'passes'}"
        of = f" for {passes(run.in_passes('served_samples'))} served"
        parts.append(
            f"{fresh_passes}{of}; the data set is in memory, so nothing is decoded"
            if run.in_memory
            else f"{fresh_passes} decoded{again}{of}: {fewer(run.saved)}"
        )
    if run.stall_share is not None:
        stall = duration(run.number("stall_seconds"))
        moved = run.table("offload").get("transfer_seconds")
        more = f" and {duration(moved)} waiting for transfers" if moved is not None else ""
        wall = duration(run.number("wall_seconds"))
        what = "samples" if run.in_memory else "decoding"
        parts.append(f"{stall} of {wall} waiting for {what}{more}")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _judged_set(run: Run, what: str) -> str:
    sets = {"test": "test ", "holdout": "hold-out "}
    return f"{sets.get(run.record.get(f'{what}_on') or '', '')}{what}"


def _alerts(run: Run) -> str:
    done, error = run.number("steps") or 0, run.record.get("error")
    steps = words.counted(done, "step")
    text = {
        "completed": "",
        "running": f"This run is still going, at step {count(done)}; the figures are those so far.",
        "interrupted": f"The run was interrupted after {steps}. The same command resumes it.",
        "stopped": f"The run was stopped after {steps}: other jobs of its grid were better.",
        "failed": f"The run failed after {steps}.",
    }[run.status]
    text = "\n".join(str(part) for part in (text, error) if part)
    resumed = ", ".join(map(str, run.record.get("resumed_at") or ()))
    alert = f"<p class=alert>{escape(text)}</p>" if text else ""
    return alert + (note(f"It was resumed at step {resumed}.") if resumed else "")


def _key_figures(run: Run) -> str:
    label = _judged_set(run, "accuracy")
    figures = [
        (words.accuracy(run.number("accuracy")), label[0].upper() + label[1:]),
        (words.accuracy(run.number("best_accuracy")), "Best on hold-out"),
    ]
    if (perplexity := run.number("perplexity")) is not None:
        figures = [(f"{perplexity:.2f}", _judged_set(run, "perplexity").capitalize())]
    figures += [
        (count(run.number("steps")), "Optimizer steps"),
        (duration(run.number("wall_seconds")), "Wall time"),
        (passes(run.fresh_passes), "Fresh passes"),
        (percent(run.saved), "Serves reused" if run.in_memory else "Decodes saved"),
        (percent(run.stall_share), "Stall share"),
    ]
    if run.table("offload"):
        # More figures do not fit into a row, and the lead names the fresh passes.
        figures = [figure for figure in figures if figure[1] != "Fresh passes"]
        figures[-1] = (percent(run.stall_share), "Input stall")
        figures.append((percent(run.transfer_share), "Transfer stall"))
    cells = (f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for value, name in figures)
    return f"<dl>{''.join(cells)}</dl>"


def _switches_caption(run: Run) -> str:
    reused = any(phase["reuse"] > 1 for phase in run.rows("phases"))
    caption = "Samples are reused in shaded phases; in darker ones, more often." if reused else ""
    for switch in run.rows("switches"):
        if switch.get("entered") is not None:
            caption += (
                f" The run switched to {switch['entered']} at step {switch['step']}"
                f" (epoch {switch.get('at', math.nan):.1f}): {switch['reason']};"
                f" {switch.get('detail', '')}."
            )
    return caption.strip()


def _plateau(run: Run) -> str:
    verdicts = [look["verdict"] for look in run.rows("trace") if look.get("verdict")]
    if not verdicts:
        return ""
    rule = run.table("config").get("switch") or {}
    svg = plots.plateau_trace(verdicts, rule.get("accuracy_slope"), rule.get("loss_slope"))
    hits = f" {rule['hits']} checks in a row must be flat." if rule.get("hits") else ""
    caption = (
        f"Slopes are over a window of checks, under a constant learning rate.{hits} The rule fired"
        " at a diamond. The axis is linear within the threshold, logarithmic beyond it."
    )
    reason = verdicts[-1].get("reason", "")
    last = f"The window never filled, so there are no slopes. The last check said: {reason}."
    return section("Plateau", plot(svg, caption) or note(last))


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
    return section("Phases", table(head, rows, words=(0, 6)) if rows else note("No phase began."))


def _decodes(run: Run) -> str:
    served, decodes = run.number("served_samples"), run.decodes
    decoded, extra = run.number("decoded_samples"), run.number("extra_decodes") or 0
    title = "Serves reused" if run.in_memory else "Decodes saved"
    if not served or decodes is None or decoded is None:
        return section(title, note("Nothing was served."))
    epoch = run.number("train_samples")

    def line(name: str, samples: float) -> tuple[str, ...]:
        share = passes(samples / epoch) if epoch else DASH
        return name, count(samples), share, percent(samples / served)

    rows = (
        [line("Served", served), line("First serves", decoded), line("Reused", served - decodes)]
        if run.in_memory
        else [
            line("Served (as many decodes as without reuse)", served),
            line("Decoded for a first serve", decoded),
            line("Decoded without use (again after a resume, or ahead of a pass's end)", extra),
            line("Saved", served - decodes),
        ]
    )
    if cached := run.number("cached_samples"):
        rows.insert(-1, line("First served from the decoded cache", cached))
    skipped = run.number("skipped_samples")
    replaced = f" Samples that others replaced, as they could not be read: {count(skipped)}."
    full = max(served, decodes)
    bar = f"<i style='width:{100 * decoded / full:.2f}%'></i>"
    bar += f"<i style='width:{100 * extra / full:.2f}%'></i>" if extra else ""
    return section(
        title,
        f"<div class=bar>{bar}</div>",
        table(("", "Samples", "Passes", "Of served"), rows),
        note(
            f"The reuse buffer took {size(run.number('buffer_bytes') or 0)}; putting batches"
            f" together took {duration(run.number('serve_seconds'))}."
            f"{replaced if skipped else ''}"
        ),
    )


def _config(run: Run) -> str | None:
    path = run.folder / "config.yaml"
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        text = yaml.safe_dump(run.table("config"), sort_keys=False) if run.table("config") else ""
    return f"<pre>{escape(text.strip())}</pre>" if text.strip() else None
