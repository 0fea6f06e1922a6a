"""Claim: memory, seconds and cost of a step are known before a weight exists.

[H200]   predicted by offload/cards/h200.json, which was fitted on GPT-2 of 12 layers, beside what
         was measured on 2026-11-22. No GPU is needed, and none is used.
[here]   what recording a step costs on this machine, each in a process of its own
[CPU]    a card file of this CPU, made now, beside steps that really run here, in turns
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.models import GPT2_XL, LLAMA_7B, Decoder, Kind, WordLoss, adamw
from benchmarks.harness.command import Options
from benchmarks.harness.process import read_memory_mib, run_in_fresh_process
from benchmarks.harness.report import Report, Target, format_table
from benchmarks.offloading.estimated_models import MODELS, CpuModel, measure_step
from benchmarks.offloading.nets import Size
from offload import TaskGraph, plan
from offload.estimating.card import Card, read_card
from offload.estimating.card_measuring import measure_card
from offload.estimating.on_cards import CardSet, estimate_cards, price_step, read_cards
from offload.estimating.pricing import costs_of
from offload.estimating.shadow_session import ShadowSession
from offload.plans.plan import largest_peak

LLAMA_80B = Size(128256, 8192, 80, 64, 28672, 1, 1024)
SEVEN = Kind(LLAMA_7B, lora=16, checkpointed=True)
EIGHTY = Kind(LLAMA_80B, checkpointed=True)
CARDS = "rtx3090,rtx4090,rtx5090,l4,a10g,l40s,a100-40,h100"
IN_8_GIB = (1.03, 1.04)
"""What 7B LoRA in 8 GiB took on the H200, over no budget."""


@dataclass(frozen=True, slots=True)
class OnH200:
    """What was measured there: benchmarks/results/2026-11-22_gpu_{kernels,speed}.md."""

    name: str
    kind: Kind
    seconds: float
    gib: float | None = None


STEPS = (
    OnH200("GPT-2, 12 layers: fitted on it", Kind(replace(GPT2_XL, depth=12), "gpt2"), 0.0984),
    OnH200("GPT-2 XL", Kind(GPT2_XL, "gpt2"), 0.222, 29.35),
    OnH200("7B LoRA", SEVEN, 0.704, 16.40),
)  # fmt: skip


def record_language(kind: Kind, capability: tuple[int, int] = (9, 0)) -> TaskGraph:
    """The graph of a language model's second step on a card that is not here."""
    with torch.device("meta"):
        model = Decoder(kind)
    model = model.to(kind.dtype)
    loss, optimizer = WordLoss(model), adamw(model)
    batch = kind.size.text()
    with ShadowSession(model, optimizer, device="cuda:0", capability=capability) as session:
        for _ in range(2):
            session.take_graphs()
            with session.step():
                words, targets = session.without_bytes(batch)
                loss(model(words), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        [graph] = session.take_graphs()
    return graph


def measure(options: Options) -> Report:
    report = Report("estimate", "Claim: memory, seconds and cost are known before a weight exists")
    parts = options.only or (("CPU",) if options.smoke else ("H200", "here", "CPU"))
    if "H200" in parts:
        _judge_h200(report)
    if "here" in parts:
        _time_records(report)
    if "CPU" in parts:
        _judge_cpu(report, MODELS[:1] if options.smoke else MODELS, 1 if options.smoke else 9)
    report.remarks = [
        "A peak on the CPU is that of the same passes over the graph of a real step, whose kernels"
        " were measured. Both are before packing.",
        "The interval is the worst of the card file's own check steps.",
    ]
    return report


def _judge_h200(report: Report) -> None:
    card, cells = read_card("h200"), list[list[str]]()
    for step in STEPS:
        [graph] = price_step(record_language(step.kind), read_cards(["h200"]))
        made = plan(graph, None, costs_of(card), proven=False)
        off = made.predicted_seconds / step.seconds - 1
        gib = made.device_bytes / 2**30
        peak = None if step.gib is None else gib / step.gib - 1
        cells.append([
            step.name, f"{made.predicted_seconds:.4f}", f"{step.seconds:.4f}", f"{off:+.1%}",
            f"{gib:.3f}", "" if peak is None else f"{peak:+.1%}",
        ])  # fmt: skip
        report.rows.append({"on": "h200", "step": step.name, "seconds off": off, "peak off": peak})
    judged = [row for row in report.rows[1:] if row["on"] == "h200"]
    worst = max(abs(row["seconds off"]) for row in judged)
    report.asked += [
        Target("H200: seconds, worst of two models", 0.1, worst),
        Target("H200: the same over the interval shown", 1, worst / (card.error or 0.0)),
        Target("H200: peak of 7B LoRA off the measured plan's", 0.01, abs(judged[-1]["peak off"])),
    ]
    report.tables["[H200] a step"] = format_table(
        ["step", "predicted s", "measured s", "off", "peak GiB", "off"], cells
    )


def _time_records(report: Report) -> None:
    cells: list[list[str]] = []
    for name, kind, most in (("7B LoRA, 8 x 1024", SEVEN, 20), ("80B full, 1 x 1024", EIGHTY, 60)):
        row = run_in_fresh_process(_time_record, kind)
        cells.append([name, f"{row['tasks']:,}", f"{row['seconds']:.1f}", f"{row['gib']:.2f}"])
        report.asked += [
            Target(f"recording {name}, CPU", most, row["seconds"], "s"),
            Target(f"recording {name}, RSS", 1.2, row["gib"], "GiB"),
        ]
        report.rows.append({"step": name, **row})
    table = run_in_fresh_process(_time_table)
    cells.append(
        ["7B LoRA on 8 cards, the table", "", f"{table['seconds']:.1f}", f"{table['gib']:.2f}"]
    )
    report.asked.append(Target("a table of 8 cards, CPU", 60, table["seconds"], "s"))
    off = max(abs(table["slow-down"] - real) for real in IN_8_GIB)
    report.asked.append(Target("7B LoRA in 8 GiB of an H200: slow-down, off", 0.02, off))
    report.rows.append(table)
    report.tables["[here] recording two steps"] = format_table(
        ["step", "tasks", "CPU s", "GiB at most"], cells
    )


def _time_record(kind: Kind) -> dict[str, Any]:
    begin = time.process_time()
    graph = record_language(kind)
    seconds = time.process_time() - begin
    return {"tasks": len(graph.tasks), "seconds": seconds, "gib": read_memory_mib() / 1024}


def _time_table() -> dict[str, Any]:
    def record(each: CardSet) -> Sequence[TaskGraph]:
        return [record_language(SEVEN, each.capability)]

    begin = time.process_time()
    estimate_cards(read_cards(CARDS.split(",")), record)
    seconds, gib = time.process_time() - begin, read_memory_mib() / 1024
    [each] = read_cards(["h200"])
    small = each.card.model_copy(update={"memory_bytes": (8 << 30) + each.card.context_bytes})
    [found] = estimate_cards([replace(each, card=small)], record)
    assert found.within is not None
    return {"seconds": seconds, "gib": gib, "slow-down": found.within.factor}


def _judge_cpu(report: Report, models: Sequence[CpuModel], rounds: int) -> None:
    begin = time.process_time()
    card = measure_card(torch.device("cpu"), "here")
    calibrating = time.process_time() - begin
    rows = [_judge_model(card, model, rounds) for model in models]
    report.rows += rows
    offs = [abs(row["seconds off"]) for row in rows]
    peaks = [row["peak off"] for row in rows]
    held = sum(off <= (card.error or 0.0) for off in offs)
    report.asked += [
        Target("CPU: calibrating", 60, calibrating, "CPU s"),
        Target("CPU: seconds of a step, median", 0.15, median(offs)),
        Target("CPU: seconds of a step, worst", 0.25, max(offs)),
        Target("CPU: models whose seconds the interval holds", len(rows) - 1, held, "", True),
        Target("CPU: peak off the captured plan's, worst", 0.01, max(map(abs, peaks))),
        Target("CPU: peaks that are believed too small", 0, sum(off < -0.001 for off in peaks)),
    ]
    report.tables["[CPU] a step"] = format_table(
        ["model", "predicted ms", "real ms", "least, most", "off", "peak MiB", "off"],
        [[row["model"], f"{row['predicted'] * 1e3:.1f}", f"{row['real'] * 1e3:.1f}",
          f"{row['least'] * 1e3:.1f}, {row['most'] * 1e3:.1f}", f"{row['seconds off']:+.0%}",
          f"{row['peak'] / 2**20:.1f}", f"{row['peak off']:+.2%}"] for row in rows],
    )  # fmt: skip
    report.setting |= {"interval": f"{card.error:.0%}"}


def _judge_model(card: Card, model: CpuModel, rounds: int) -> dict[str, Any]:
    graph, captured, times = measure_step(model, rounds)
    [priced] = price_step(graph, [replace(read_cards(["l4"])[0], card=card)])
    made = plan(priced, None, costs_of(card), proven=False)
    real = median(times)
    return {
        "model": model.name,
        "predicted": made.predicted_seconds,
        "real": real,
        "least": min(times),
        "most": max(times),
        "seconds off": made.predicted_seconds / real - 1,
        "peak": largest_peak(captured),
        "peak off": largest_peak(priced) / largest_peak(captured) - 1,
    }
