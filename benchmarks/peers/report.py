"""What was measured -> tables and remarks.

Rounds differ in load, the rows of one round do not: a ratio is taken within a round, and of the
ratios the median.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness.report import Report, format_table
from benchmarks.peers.contract import Row
from benchmarks.peers.rows import ASKED

AGAINST = ("threads", "torch-floats", "ffcv-raw")
BURNS = 0.01
"""Of a core while it should wait: more is said under the table."""


@dataclass(slots=True)
class Seen:
    """What is known of a row."""

    row: Row
    problem: str = ""
    hello: dict[str, Any] = field(default_factory=dict)
    conversion: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    passes: list[dict[str, float]] = field(default_factory=list)
    stall: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    @property
    def cpu(self) -> list[float]:
        """Microseconds an image, a round each."""
        return [1e6 * p["cpu"] / p["served"] for p in self.passes]

    @property
    def rate(self) -> list[float]:
        """Images a second of wall time."""
        return [p["served"] / p["wall"] for p in self.passes]


def spread(values: Sequence[float], form: str = "") -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    form = form or (".0f" if middle >= 100 else ".1f")
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def ratio(reference: Seen | None, this: Seen) -> str:
    """How many images `this` serves with the CPU time of one of the reference's."""
    if reference is None or len(reference.passes) != len(this.passes):
        return ""
    return spread([a / b for a, b in zip(reference.cpu, this.cpu, strict=True)], ".2f")


def without_reuse(key: str) -> str:
    """The row that stores and decodes as this one of ours, and serves once."""
    ours = re.fullmatch(r"(ours|adopted)-\d+(.*)", key)
    return f"{ours[1]}-1{ours[2]}" if ours else ""


def table(seen: Sequence[Seen]) -> str:
    known = {s.row.key: s for s in seen if s.passes and not s.problem}
    against = {known[key].row.name: known[key] for key in AGAINST if key in known}
    paces = next((list(s.stall) for s in known.values() if s.stall), [])
    head = ["loader", "pictures", "CPU us/image, median [min, max]"]
    head += ["images/CPU s against itself without reuse"]
    head += [f"... against: {name}" for name in against]
    head += ["images/s", "peak RSS, MiB: own (before opening) + workers", "open + first batch, s"]
    head += [f"waits at {pace}, %" for pace in paces] + ["conversion"]
    lines = []
    for s in seen:
        if s.row.key not in known:
            lines.append([s.row.name, s.problem or "not measured", *[""] * (len(head) - 2)])
            continue
        cells = [s.row.name, s.hello["output"], spread(s.cpu)]
        cells.append(ratio(known.get(without_reuse(s.row.key)), s))
        cells += [ratio(other, s) for other in against.values()]
        cells += [
            spread(s.rate),
            f"{s.memory['own']:.0f} ({s.start['memory_before']:.0f}) + {s.memory['children']:.0f}",
            f"{s.start['opened']:.2f} + {s.start['first_batch']:.2f}",
        ]
        cells += [f"{100 * statistics.median(s.stall[p]):.0f}" if p in s.stall else ""
                  for p in paces]  # fmt: skip
        cells.append(
            f"{s.conversion['seconds']:.1f} s, {s.conversion['bytes'] / 1e6:.0f} MB"
            if s.conversion
            else ""
        )
        lines.append(cells)
    return format_table(head, lines)


def asked(seen: Sequence[Seen]) -> str:
    """What was asked of us, beside what was measured. Empty: nothing of it was."""
    known = {s.row.key: s for s in seen if s.passes and not s.problem}
    lines = []
    for what, ours, theirs, most in ASKED:
        others = [known[key] for key in theirs if key in known]
        if ours not in known or not others:
            continue
        cheapest = min(others, key=lambda one: statistics.median(one.cpu))
        found = ratio(known[ours], cheapest)
        lines.append([what, cheapest.row.name, found, str(most)])
    head = ["CPU time of a served picture", "over", "median [min, max]", "asked"]
    return format_table(head, lines) if lines else ""


def remarks(seen: Sequence[Seen]) -> list[str]:
    """What a reader of the table must know and would not see."""
    said = []
    for s in seen:
        waited = sum(p["idle_wall"] for p in s.passes)
        share = sum(p["idle"] for p in s.passes) / waited if waited else 0.0
        if share > BURNS:
            said.append(
                f"{s.row.name}: used {100 * share:.1f} % of a core while it should wait, which"
                " its time an image does not have."
            )
    return said


def report(setting: dict[str, Any], seen: Sequence[Seen]) -> Report:
    versions: dict[str, str] = {}
    for s in seen:
        versions |= s.hello.get("versions", {})
    tables = {"What was asked": asked(seen), "Loaders": table(seen)}
    return Report(
        "loader_vs_peers", "Claim: a decoded sample that is served again costs a fraction",
        setting | versions, {title: text for title, text in tables.items() if text},
        remarks=remarks(seen),
        rows=[asdict(s) | {"cpu_us": s.cpu if s.passes else []} for s in seen],
    )  # fmt: skip
