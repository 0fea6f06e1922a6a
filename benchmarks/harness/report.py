"""What a claim's module measured -> tables (Markdown) and everything (JSON), dated.

Targets stand beside what was measured, met or not.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A number that was asked for, and ours."""

    what: str
    most: float
    """The limit; with `at_least`, the least."""
    measured: float | None
    """None: not measured (yet)."""
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
        missed = f"no: {self.measured / self.most:.2f} times as much" if self.most else "no"
        return [self.what, limit, f"{self.measured:.3g}{unit}", "yes" if self.met else missed]


@dataclass(slots=True)
class Report:
    """What a claim's module returns."""

    part: str
    claim: str
    setting: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    """Markdown by title."""
    asked: list[Target] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What a reader of the tables must know and would not see."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Everything, for the JSON file."""

    def text(self) -> str:
        parts = []
        if self.asked:
            head = ["asked", "limit", "measured", "met"]
            parts.append(format_table(head, [target.cells() for target in self.asked]))
        parts += [f"## {title}\n\n{body}" for title, body in self.tables.items()]
        parts.append("\n".join(f"- {remark}" for remark in self.remarks))
        return "\n\n".join(part for part in parts if part)


def write_report(report: Report, stem: Path, machine: Mapping[str, Any], command: str) -> str:
    """Write `stem`.md and `stem`.json; return the text. `machine`: of `describe_run`, and more."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    facts = ", ".join(f"{key} {value}" for key, value in (report.setting | {**machine}).items())
    text = f"# {report.claim}\n\n`{command}`\n\n{facts}\n\n{report.text()}\n"
    stem.with_suffix(".md").write_text(text)
    asked = [
        {"what": target.what, "most": target.most, "measured": target.measured, "met": target.met}
        for target in report.asked
    ]
    everything = {
        "command": command, "setting": report.setting, "machine": {**machine}, "asked": asked,
        "rows": report.rows,
    }  # fmt: skip
    stem.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
    return text


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def format_spread(values: Sequence[float], form: str = ".3g") -> str:
    """Median [least, most]; a single value as it is."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def round_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio within each round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
