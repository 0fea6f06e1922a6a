"""What a case's trainings say: planned with plain Lightning's bits, refused, eager, ... (pure)"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

EQUAL = "planned, bit-equal"
LONGEST = 400


@dataclass(frozen=True, slots=True)
class Run:
    """One training, in a process of its own."""

    budget: str
    """`plain`: without the strategy. `none`: with it, and no budget. Else a share."""
    planned: bool = False
    """Whether plans ran all steps. A step that asks for values in its middle is run by one plan for
    each part between two of them; if a single part ran as it was issued, the run is not planned."""
    tasks: int = 0
    """Of the plan."""
    graphs: int = 0
    """Graphs that ran. More than one: shapes, or values that the step asks for, have changed."""
    compared: int = 0
    """Tensors and numbers of module and optimizer."""
    differing: tuple[str, ...] = ()
    """Those that are not plain Lightning's."""
    error: str = ""
    """The class of the exception that ended it, or `hung`, `crashed`, `missing`."""
    said: str = ""
    """The exception, or why it was trained eagerly, or a part of it as it was issued."""
    raised_at: str = ""
    """The file and line of ours that refused; where nobody refused, what failed."""
    asked_at: str = ""
    """The file and line of the module or its library that was being run."""
    seconds: float = 0.0
    """CPU."""

    @property
    def equal(self) -> bool:
        return not self.error and not self.differing

    @property
    def refused(self) -> bool:
        return self.error == "CaptureError"


@dataclass(frozen=True, slots=True)
class Row:
    """A case with one version of our code."""

    name: str
    library: str
    runs: tuple[Run, ...]

    @property
    def best(self) -> Run:
        """With a budget if that trained, else without one, else whatever ended first."""
        return next((run for run in self.runs if not run.error), self.runs[0])

    @property
    def status(self) -> str:
        first, best, last = self.runs[0], self.best, self.runs[-1]
        if best.budget == "plain":
            return "not installed" if best.error == "missing" else "plain run fails"
        if best.error:
            return best.error if best.error in ("hung", "crashed") else f"fails: {best.error}"
        bits = "bit-equal" if best.equal else f"{len(best.differing)} of {best.compared} differ"
        if last.budget == "plain" and last.differing:
            bits += f", {len(last.differing)} of plain Lightning's own second run"
        if not best.planned:
            refused = "refused" if first.refused else f"fails ({first.error})"
            how = "some steps as issued" if best.tasks else "eager"
            return f"{refused}; without a budget {how}, {bits}" if first.error else f"{how}, {bits}"
        if best is first:
            return f"planned, {bits}"
        if first.error == "BudgetTooSmall":
            return f"planned, {bits} (within {best.budget}: {first.budget} is too small)"
        return f"planned, {bits} (without a budget: {first.budget} fails, {first.error})"

    @property
    def planned(self) -> bool:
        """Within a budget: without one, steps that come once are run as issued."""
        return self.status.startswith(EQUAL) and self.best.budget != "none"

    @property
    def why(self) -> str:
        """The first line of what stands against a plan; empty if nothing does."""
        blocked = self.blocking
        return "" if blocked is None else first_line(_bare(blocked.said))

    @property
    def blocking(self) -> Run | None:
        """The run that says why there is no plan, or no plan within 80 %."""
        if self.planned:
            return None
        against = [run for run in self.runs if run.said and run.error != "BudgetTooSmall"]
        return next(iter(against), self.runs[0])


def first_line(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def causes(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows without a plan by the line of ours that refuses and what it says, most first."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if (run := row.blocking) is not None:
            found[f"{run.raised_at or run.error or 'as issued'}: {_kind(run.said)}"].append(row)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _bare(said: str) -> str:
    """The reason without what every refusal says around it."""
    text = re.sub(r"^OffloadStrategy\(budget=.*?\): this run cannot be planned: ", "", said)
    return text.partition(". Without a plan no budget can be kept")[0]


def _kind(said: str) -> str:
    """The reason without what is the module's own: its lines, names and numbers."""
    line = first_line(_bare(said))
    line = re.sub(r"[\w./-]+\.py:\d+( \(in \w+\)| in \w+)?", "FILE", line)
    return re.sub(r"\d+", "N", line)[:160]
