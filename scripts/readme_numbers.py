"""Checks, or writes, the numbers of README: each is that of a result file.

    python scripts/readme_numbers.py               what differs, what has no source; exit code 1
    python scripts/readme_numbers.py --write       takes the numbers from the files
    python scripts/readme_numbers.py --demo LOG    takes the promises from what `make demo` printed

Behind a number stands a comment that no reader sees, `<!-- FILE > KEY > KEY -->`. FILE lies in
benchmarks/results, or is pyproject.toml. In JSON and TOML the keys lead to a value. In Markdown
they are the first cell of a row and the head of a column. A last key `#2` is the second number of a
text.
Code, links' targets and numbers that are part of a name (GPT-2, H200) are not looked at.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
NUMBER = r"(?<![\w.-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)"
FOUND = re.compile(rf"({NUMBER})(?:<!-- (.*?) -->)?")
PROMISE = re.compile(r"^(held|FAILED) +(.+?): (.+)\. Otherwise: (.*)$", re.MULTILINE)
SKIPPED = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


class NoSource(ValueError):
    """A number of README, or the comment behind it, leads to no value."""


def value_of(source: str, root: Path = ROOT) -> str:
    """The number that a comment names, as its file has it."""
    name, *keys = source.split(" > ")
    file = root / name if name == "pyproject.toml" else root / "benchmarks" / "results" / name
    place = int(keys.pop()[1:]) if keys and re.fullmatch(r"#\d+", keys[-1]) else 1
    try:
        text = file.read_text(encoding="utf-8")
        found: Any = text
        if file.suffix == ".md":
            found = cell(text, *keys)
        else:
            found = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
            for key in keys:
                found = found[int(key)] if isinstance(found, list) else found[key]
        return re.findall(NUMBER, str(found))[place - 1]
    except (OSError, LookupError, ValueError, TypeError) as error:
        raise NoSource(f"<!-- {source} --> leads to no number: {error!r}") from error


def cell(text: str, row: str, column: str) -> str:
    """The cell of the first table that has such a row and column."""
    head: list[str] = []
    for line in text.splitlines():
        cells = [one.replace("**", "").strip() for one in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif cells[0] == row and column in head:
            return cells[head.index(column)]
    raise LookupError(f"no table has a row '{row}' and a column '{column}'")


def as_shown(value: str, shown: str) -> str:
    """The value with as many decimals as are shown, and with a plus if one is shown."""
    decimals = len(shown.partition(".")[2])
    sign = "+" if shown.startswith("+") else ""
    return f"{float(value.replace(',', '')):{sign},.{decimals}f}"


def corrected(text: str, root: Path = ROOT) -> tuple[str, list[str]]:
    """The text with the numbers of their files, and what was wrong with it."""
    wrong: list[str] = []

    def one(match: re.Match[str]) -> str:
        shown, source = match.groups()
        if source is None:
            wrong.append(f"{shown} has no source: {line_of(text, match.start())}")
            return match[0]
        try:
            right = as_shown(value_of(source, root), shown)
        except NoSource as error:
            wrong.append(str(error))
            return match[0]
        if right != shown:
            wrong.append(f"{shown} is {right} in {source}")
        return match[0].replace(shown, right, 1)

    parts, end = [], 0
    for skipped in SKIPPED.finditer(text):
        parts += [FOUND.sub(one, text[end : skipped.start()]), skipped[0]]
        end = skipped.end()
    return "".join((*parts, FOUND.sub(one, text[end:]))), wrong


def line_of(text: str, at: int) -> str:
    return text[text.rfind("\n", 0, at) + 1 :].split("\n", 1)[0]


def promises_of(log: Path) -> dict[str, Any]:
    """What the last lines of `make demo` say: a promise, ours, otherwise, the verdict."""
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    found: dict[str, Any] = {"measured": f"{date.today()}, commit {commit}"}
    for verdict, what, ours, otherwise in PROMISE.findall(log.read_text(encoding="utf-8")):
        found[what] = {"ours": ours, "otherwise": otherwise, "verdict": verdict}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="take the numbers from the files")
    parser.add_argument(
        "--demo", type=Path, help="take the promises from what make demo printed into this file"
    )
    args = parser.parse_args()
    if args.demo:
        told = json.dumps(promises_of(args.demo), indent=1, ensure_ascii=False)
        (RESULTS / "promises.json").write_text(told + "\n", encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    right, wrong = corrected(text)
    if args.write:
        README.write_text(right, encoding="utf-8")
        _, wrong = corrected(right)
    sys.stderr.writelines(f"{one}\n" for one in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
