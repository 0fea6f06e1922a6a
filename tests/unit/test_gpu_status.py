"""docs/gpu-status.md: every test for a GPU is in it, every command is one, every row is dated."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATUS = (ROOT / "docs" / "gpu-status.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in STATUS.splitlines() if line.startswith("| ")][1:]
PATHS = r"(?:tests|benchmarks|configs)/[\w./]+\w"


def test_every_file_with_tests_for_a_gpu_has_a_command() -> None:
    marked = re.compile(r"mark\.gpu\b")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [
        file.relative_to(ROOT).as_posix()
        for file in files
        if marked.search(file.read_text(encoding="utf-8")) and file != Path(__file__).resolve()
    ]
    assert found
    assert [file for file in found if file not in STATUS] == []


def test_every_command_names_what_is_there() -> None:
    commands = [command for _, command, _ in ROWS]
    assert all(command.startswith("`") for command in commands)
    missing = {p for c in commands for p in re.findall(PATHS, c) if not (ROOT / p).exists()}
    assert missing == set()


def test_a_row_says_when_and_where_it_ran_or_that_it_did_not() -> None:
    last = [last for *_, last in ROWS]
    assert len(last) > 10
    assert [s for s in last if not re.match(r"not yet run on a GPU$|20\d\d-\d\d-\d\d, \w", s)] == []


def test_its_top_says_plainly_that_nothing_has_run_while_nothing_has() -> None:
    nothing = all(last == "not yet run on a GPU" for *_, last in ROWS)
    assert nothing == ("**Nothing of this project has run on a GPU yet.**" in STATUS)
