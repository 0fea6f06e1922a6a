"""What the attempts to plug a pipeline in say of it (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST = 320
PLUGS_IN = "plugs in"
CHANGED = "plugs in after the documented change"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One form of a pipeline, tried with one version of our code."""

    change: str
    """Empty: the pipeline as it is."""
    error: str = ""
    """The class of the exception that refused it, or `hung`, `crashed`, `missing`, `broken`."""
    said: str = ""
    summary: str = ""
    """The loader's own line: what is cached, what is redone."""
    structure: str = ""
    """How a batch differs from the DataLoader's: nests, shapes, dtypes. Empty: not at all."""
    served: str = ""
    """How the serves of a pass differ from `reuse` of every sample."""
    draws: str = ""
    """What is wrong with the draws of a sample's two serves."""
    content: str = ""
    """How, without random steps, batches differ from what the data set gives."""
    rounding: float = 0.0
    """The largest difference that was taken for equal."""
    resumed: str = ""
    """How batches after a resume differ from those without one."""
    seconds: float = 0.0

    @property
    def wrong(self) -> dict[str, str]:
        """The facts that do not hold."""
        facts = {
            "structure": self.structure, "serves": self.served, "draws": self.draws,
            "content": self.content, "resume": self.resumed,
        }  # fmt: skip
        return {name: said for name, said in facts.items() if said}

    @property
    def holds(self) -> bool:
        return not self.error and not self.wrong


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """A pipeline with one version of our code."""

    name: str
    attempts: tuple[Attempt, ...]

    @property
    def last(self) -> Attempt:
        """The attempt that was served or never ended; if there is none, the pipeline as it is."""
        ends = "", "hung", "crashed"
        return next((each for each in self.attempts if each.error in ends), self.attempts[0])

    @property
    def status(self) -> str:
        last = self.last
        if last.error == "missing":
            return f"not installed: {last.said}"
        if last.error == "broken":
            return f"fails by itself: {first_line(last.said)}"
        if last.error in ("hung", "crashed"):
            return last.error
        if last.error:
            return "refused"
        if last.wrong:
            return "WRONG: " + "; ".join(f"{name}: {said}" for name, said in last.wrong.items())
        return CHANGED if last.change else PLUGS_IN

    @property
    def told(self) -> str:
        """The status, with the change where there is one."""
        return f"{PLUGS_IN} after {self.last.change}" if self.status == CHANGED else self.status

    @property
    def refused(self) -> str:
        """The first line of what the pipeline as it is was told."""
        first = self.attempts[0]
        unmade = first.error in ("", "missing", "broken", "hung", "crashed")
        return "" if unmade else first_line(f"{first.error}: {first.said}")

    @property
    def redone(self) -> str:
        """What is cached and what is redone, of the loader's own line."""
        return self.last.summary.partition("; reuse ")[0]

    @property
    def facts(self) -> str:
        """The checks that hold, in a word each."""
        last = self.last
        if last.error:
            return ""
        content = f"content to {last.rounding:.0e}" if last.rounding else "content"
        names = {"structure": "structure", "serves": "twice", "draws": "draws",
                 "content": content, "resume": "resume"}  # fmt: skip
        return ", ".join(said for name, said in names.items() if name not in last.wrong)


def first_line(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def counted(rows: Sequence[PipelineRow]) -> dict[str, int]:
    """Pipelines by what became of them, in the order of a table."""
    kinds: dict[str, int] = dict.fromkeys((PLUGS_IN, CHANGED, "refused"), 0)
    for row in rows:
        kind = row.status.partition(":")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds
