"""What a part measured -> tables (markdown) and everything (JSON), dated.

Rounds differ in load, the rows of one round do not: a ratio is taken within a round, and of the
ratios the median. What the issue asks stands beside what was measured, met or not.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import provenance


@dataclass(frozen=True, slots=True)
class Asked:
    """A number of the issue, and ours."""

    what: str
    most: float
    """Or, `at_least`, the least."""
    measured: float | None
    """None: it is not there (yet)."""
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.most if self.at_least else self.measured <= self.most

    def cells(self) -> list[str]:
        unit = f" {self.unit}" if self.unit else ""
        limit = f"{'>=' if self.at_least else '<='} {self.most:g}{unit}"
        if self.measured is None:
            return [self.what, limit, "", "not measured"]
        falls = f"no: {self.measured / self.most:.2f} times as much" if self.most else "no"
        return [self.what, limit, f"{self.measured:.3g}{unit}", "yes" if self.met else falls]


@dataclass(slots=True)
class Report:
    """Of one part."""

    part: str
    claim: str
    setting: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    """Markdown by title."""
    asked: list[Asked] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What a reader of the tables must know and would not see."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Everything, for the JSON file."""

    def text(self) -> str:
        parts = []
        if self.asked:
            head = ["asked", "limit", "measured", "met"]
            parts.append(table(head, [one.cells() for one in self.asked]))
        parts += [f"## {title}\n\n{body}" for title, body in self.tables.items()]
        parts.append("\n".join(f"- {remark}" for remark in self.remarks))
        return "\n\n".join(part for part in parts if part)


def measure_and_print(measure: Callable[[], Report], stem: Path) -> None:
    """One part of a program, from its measuring to `stem`.md, `stem`.json and the screen."""
    load = os.getloadavg()[0]
    report = measure()
    print(write(report, stem, {**provenance(), "load_before": load}, command()), flush=True)


def command() -> str:
    """What was typed to measure this."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def write(report: Report, stem: Path, machine: Mapping[str, Any], command: str) -> str:
    """`stem`.md and `stem`.json; returns the text. `machine`: of `provenance`, and more."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    facts = ", ".join(f"{key} {value}" for key, value in (report.setting | {**machine}).items())
    text = f"# {report.claim}\n\n`{command}`\n\n{facts}\n\n{report.text()}\n"
    stem.with_suffix(".md").write_text(text)
    asked = [
        {"what": one.what, "most": one.most, "measured": one.measured, "met": one.met}
        for one in report.asked
    ]
    everything = {
        "command": command, "setting": report.setting, "machine": {**machine}, "asked": asked,
        "rows": report.rows,
    }  # fmt: skip
    stem.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Median [least, most]; of one value itself."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Within each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
