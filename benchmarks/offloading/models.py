"""Step time, bytes and the smallest budget of four models, each in a process of its own (steps.py).

With one thread of torch and with its own choice, the outputs placed by the allocator shim; and
once more with outputs that are copied to their places, which needs no compiler.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.command import Options
from benchmarks.harness.process import run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_spread, format_table, round_ratios
from benchmarks.offloading.nets import cases
from benchmarks.offloading.steps import ModelJob, run_model

ROUNDS = 7
WAYS = ((1, "shim"), (0, "shim"), (1, "copy"))
"""Threads of torch (0: its choice), placement of outputs."""
SMOKE_WAYS = ((1, "shim"), (1, "copy"))
"""Two threads on two busy cores wait for each other, 100 times as long as they work."""
RESIDENT, AT_40, FRAGMENTATION = 1.03, 1.15, 1.05
SMALLEST = {"gpt2-small": 0.20, "gpt2-small-hf": 0.20, "vit-b-16": 0.05}


def measure(options: Options) -> Report:
    smoke = options.smoke
    report = Report(
        "models",
        "Claim: a resident plan takes <= 1.03x eager's CPU time a step, at 40 % of the memory <="
        " 1.15x and the copies; GPT-2-small runs in 20 % of its memory, ViT-B/16 in 5 %",
        {"rounds": options.rounds, "time": "CPU s of the process, median [min, max]"},
    )
    known = cases(smoke)
    if unknown := sorted(set(options.only) - set(known)):
        raise SystemExit(f"--only: no model {unknown}; there are {', '.join(known)}")
    for name in options.only or known:
        for threads, placement in SMOKE_WAYS if smoke else WAYS:
            title = f"{name}, {threads or 'all'} threads, {placement}"
            try:
                found = run_in_fresh_process(
                    run_model, ModelJob(name, threads, placement, options.rounds, smoke)
                )
            except Exception as problem:  # said in the report: an hour of others is not lost
                report.tables[title] = f"failed: {type(problem).__name__}: {problem}"
            else:
                report.rows.append(found)
                report.tables[title] = f"{_about(found)}\n\n{_table(found['rows'])}"
                report.asked += _asked(found, title)
            print(f"{title}\n\n{report.tables[title]}\n", flush=True)
    report.remarks = [
        "eager, of its own: the optimizer's fused kernel. `x eager`: within a round.",
        "less copies: without `memcpy s`, the CPU seconds of the same copies done once more by"
        " themselves right after the step, between the same addresses of other memory.",
        "peak: what a step without offload needs in our order, whose updates come early: below"
        " what eager needs, so the shares are on the safe side.",
        "over live: device bytes over the most that lives at once, of the plan without copies.",
        "wrong: losses of the rounds, and tensors at the end (parameters, buffers, optimizer"
        " state), that differ from eager's in any bit.",
    ]
    return report


def _asked(found: dict[str, Any], title: str) -> list[Target]:
    eager, *plans = found["rows"]
    by_name = {row["name"]: row for row in plans}
    resident, smallest = by_name["resident"], by_name["smallest"]
    asked = [
        Target(f"{title}: resident, x eager", RESIDENT, _middle(resident, eager)),
        Target(
            f"{title}: 40 % (got {_share(by_name['40 %']):.0%}), x eager less copies",
            AT_40,
            _less_copies(by_name["40 %"], eager),
        ),
        Target(
            f"{title}: wrong losses and tensors",
            0,
            sum(row["wrong_losses"] + row["wrong_tensors"] for row in plans),
        ),
    ]
    if found["placement"] == "shim":
        asked.append(
            Target(f"{title}: resident over live", FRAGMENTATION,
                  resident["device_mib"] / resident["live_mib"])
        )  # fmt: skip
    if (most := SMALLEST.get(found["case"])) is not None:
        asked.append(Target(f"{title}: smallest budget, of the peak", most, _share(smallest)))
    return asked


def _about(found: dict[str, Any]) -> str:
    """What is done once: the first steps are recorded and planned, with their kernels measured."""
    seconds = format_spread([row["first_s"] for row in found["rows"][1:]])
    return f"{found['setting']}; {found['threads']} threads; first steps: {seconds} CPU s."


def _share(row: dict[str, Any]) -> float:
    return row["device_mib"] / row["peak_mib"]


def _middle(row: dict[str, Any], eager: dict[str, Any]) -> float:
    return statistics.median(round_ratios(row["cpu"], eager["cpu"]))


def _less_copies(row: dict[str, Any], eager: dict[str, Any]) -> float:
    own = [cpu - copies for cpu, copies in zip(row["cpu"], row["memcpy"], strict=True)]
    return statistics.median(round_ratios(own, eager["cpu"]))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    eager, *plans = rows
    head = [
        "plan", "device MiB", "of the peak", "over live", "host MiB",
        "tasks + offloads + reloads (recomputed)", "MiB out + in", "CPU s a step", "x eager",
        "memcpy s", "x eager less copies", "wall s", "predicted s (bound)", "wrong",
    ]  # fmt: skip
    blank = [""] * 6
    lines = [
        [
            "eager",
            *blank,
            format_spread(eager["cpu"]),
            "1",
            "",
            "1",
            format_spread(eager["wall"]),
            "",
            "",
        ]
    ]
    for row in plans:
        lines.append([
            row["name"], f"{row['device_mib']:.1f}", f"{_share(row):.1%}",
            f"{row['device_mib'] / row['live_mib']:.3f}" if row["name"] == "resident" else "",
            f"{row['host_mib']:.1f}",
            f"{row['tasks']} + {row['offloads']} + {row['reloads']} ({row['recomputed']})",
            f"{row['out_mib']:.0f} + {row['in_mib']:.0f}",
            format_spread(row["cpu"]), format_spread(round_ratios(row["cpu"], eager["cpu"])),
            f"{statistics.median(row['memcpy']):.3f}", f"{_less_copies(row, eager):.3f}",
            format_spread(row["wall"]),
            f"{row['predicted_s']:.3f} ({row['bound_s']:.3f} {row['binds']})",
            f"{row['wrong_losses']} + {row['wrong_tensors']}",
        ])  # fmt: skip
    return format_table(head, lines)
