"""Claim: the first live step costs <= 6, 4, 2.5 of plain's (MobileNetV3-small, LSTM LM, ViT), and a
second pass over 24 lengths <= 1.5.

Method  Each arm runs in a process of its own, because what torch and we do only once belongs to a
        first step: plain and live in turns, one thread, ratios within a pair. Weights and losses
        must be plain's to the last bit.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional

from benchmarks.harness.command import Options
from benchmarks.harness.process import run_in_fresh_process
from benchmarks.harness.report import (
    Report,
    Target,
    format_spread,
    format_table,
    round_ratios,
)
from benchmarks.harness.rounds import alternate_rounds
from benchmarks.strategy.nets import pictures, vit
from offload.live.core import load_core
from offload.live.session import LiveSession

LENGTHS = range(8, 193, 8)
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8192, 256)
        self.lstm = nn.LSTM(256, 256, 2, batch_first=True)
        self.scores = nn.Linear(256, 8192)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.scores(self.lstm(self.words(text))[0])


class AnyLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.words = nn.Embedding(1000, 128)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.scores = nn.Linear(128, 1000)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.scores(self.layers(self.words(text)))


def three_pictures() -> Pairs:
    return [pictures(8) for _ in range(3)]


def text(rows: int, words: int, lengths: Sequence[int]) -> Pairs:
    return [(torch.randint(words, (rows, n)), torch.randint(words, (rows, n))) for n in lengths]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Pairs], tuple[float | None, ...]]] = {
    "MobileNetV3-small": (
        partial(torchvision.models.mobilenet_v3_small, num_classes=10), three_pictures,
        (6, None, None),
    ),
    "LSTM LM": (Lstm, partial(text, 2, 8192, [128] * 3), (4, None, None)),
    "ViT": (partial(vit, 12), three_pictures, (2.5, None, None)),
    "24 lengths": (AnyLength, partial(text, 8, 1000, LENGTHS), (None, 1.5, None)),
}  # fmt: skip
"""What is trained on what, and what is asked of steps (of passes) 1, 2 and 3."""


def run_arm(name: str, live: bool) -> dict[str, Any]:
    """CPU seconds of three steps, or of three passes over the lengths."""
    torch.set_num_threads(1)
    load_core()
    torch.manual_seed(0)
    make, batches, _ = CASES[name]
    net, pairs = make(), batches()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    session = LiveSession(net, optimizer, budget="100%") if live else None
    seconds, losses = list[float](), list[torch.Tensor]()
    turns = [pairs] * 3 if name == "24 lengths" else [[pair] for pair in pairs]
    with session or nullcontext():
        for turn in turns:
            begin = time.process_time()
            for x, y in turn:
                with session.step() if session else nullcontext():
                    loss = functional.cross_entropy(net(x).flatten(0, -2), y.flatten())
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())
            seconds.append(time.process_time() - begin)
    state = b"".join(t.detach().numpy().tobytes() for t in (*losses, *net.state_dict().values()))
    planned = session.planned_steps if session else 0
    return {"seconds": seconds, "digest": hashlib.sha1(state).hexdigest(), "planned": planned}


def measure(options: Options) -> Report:
    rounds = options.rounds
    names = options.only or [*CASES][:: 3 if options.smoke else 1]
    report = Report(
        "live_first_steps",
        "Claim: the first live step costs <= 6, 4, 2.5 of plain's, a second pass over 24 lengths"
        " <= 1.5",
        {"rounds": rounds, "torch threads": 1, "budget": "100%", "time": "CPU s, median [range]"},
    )
    lines = []
    for name in names:
        seen: dict[str, list[dict[str, Any]]] = {"plain": [], "live": []}
        for _, order in alternate_rounds(seen, rounds):
            for who in order:
                seen[who].append(run_in_fresh_process(run_arm, name, who == "live"))
        wrong = len({one["digest"] for arm in seen.values() for one in arm}) - 1
        report.rows.append({"model": name, "wrong": wrong, **seen})
        for step, most in enumerate(CASES[name][2]):
            plain, live = ([one["seconds"][step] for one in seen[who]] for who in seen)
            shares = round_ratios(live, plain)
            if most is not None:
                what = f"{name}, {step + 1}: x plain"
                report.asked.append(Target(what, most, statistics.median(shares)))
            cells = [format_spread([1e3 * s for s in arm]) for arm in (plain, live)]
            lines.append([name, str(step + 1), *cells, format_spread(shares, ".2f"), str(wrong)])
            print(" | ".join(lines[-1]), flush=True)
    wrong = sum(row["wrong"] for row in report.rows)
    report.asked.append(Target("runs that differ in any bit", 0, wrong))
    head = ["model", "step or pass", "plain ms", "live ms", "live x plain", "wrong"]
    report.tables["CPU time"] = format_table(head, lines)
    return report
