"""docs/gpu-status.md: every test for a GPU is in it, what it names is there, every row is dated."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATUS = (ROOT / "docs" / "gpu-status.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in STATUS.splitlines() if line.startswith("| ")][1:]
PATHS = r"(?:tests|benchmarks|configs)/[\w./]+\w"


def test_every_file_with_tests_for_a_gpu_has_a_command() -> None:
    marked = re.compile(r"mark\.gpu\b|on_each_accelerator|only_on_gpu|pairs_on_each|some_on_gpu")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [
        file.relative_to(ROOT).as_posix()
        for file in files
        if marked.search(file.read_text(encoding="utf-8")) and file != Path(__file__).resolve()
    ]
    assert found
    assert [file for file in found if file not in STATUS] == []


def test_every_path_names_what_is_there() -> None:
    named = [re.findall(PATHS, path) for path, *_ in ROWS]
    assert all(named)
    assert {p for some in named for p in some if not (ROOT / p).exists()} == set()


def test_a_row_says_at_which_commit_it_ran_or_that_it_did_not() -> None:
    commit = r"[0-9a-f]{7}\b"
    assert len(ROWS) > 10
    for _, fake, gpu in ROWS:
        assert re.match(rf"not yet$|it cannot say: \w|{commit}", fake), fake
        assert re.match(rf"not yet$|20\d\d-\d\d-\d\d, {commit}", gpu), gpu
