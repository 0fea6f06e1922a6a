"""Every benchmark can be imported, what the docs name is there, a result names its commit."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.measure import PARTS, find_module

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
IMPORTED = """
import importlib, sys
from pathlib import Path

root = Path.cwd()
sys.path[:0] = [str(root), str(root / "benchmarks" / "elastic_peers")]
for file in sorted((root / "benchmarks").rglob("[!_]*.py")):
    try:
        importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
    except ModuleNotFoundError as error:
        if (root / (error.name or "").split(".")[0]).exists():
            raise
    print(file.stem)
"""
"""Imports each file; a package that is not installed is left to whoever runs the benchmark."""
COMMITS_SINCE = "2026-11-25"
COMMIT = re.compile(r'"?commit"?:? "?[0-9a-f]{7,40}|\b[0-9a-f]{7,40}\b.{0,40}commit')


def run_python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_benchmark_can_be_imported_without_starting() -> None:
    files = sorted((ROOT / "benchmarks").rglob("[!_]*.py"))
    assert run_python("-c", IMPORTED).split() == [file.stem for file in files]


@pytest.mark.parametrize("suite", PARTS)
def test_every_part_measures_and_says_in_its_head_what(suite: str) -> None:
    for part in PARTS[suite]:
        module = import_module(find_module(suite, part))
        assert module.__doc__ and callable(module.measure), part


def test_a_part_writes_its_tables_and_its_numbers_with_commit_and_machine(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.measure", "fleet", "hand_over", "--smoke", "--date", "2000-01-01"]
    run_python(*command, "--out", str(tmp_path))
    stem = tmp_path / "2000-01-01_fleet_cpu_hand_over"
    for suffix in (".md", ".json"):
        text = stem.with_suffix(suffix).read_text(encoding="utf-8")
        for fact in ("commit", "processor", "torch", "benchmarks.measure fleet hand_over"):
            assert fact in text, (suffix, fact)


def test_what_the_docs_run_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    modules = {m for t in texts.values() for m in re.findall(r"-m (benchmarks(?:\.\w+)+)", t)}
    assert {"benchmarks.measure", "benchmarks.accuracy"} <= modules
    for module in modules:
        place = ROOT.joinpath(*module.split("."))
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
    named = {p for t in texts.values() for p in re.findall(r"benchmarks\.measure (\w+ \w+)", t)}
    known = {f"{suite} {part}" for suite, parts in PARTS.items() for part in (*parts, "PART")}
    assert named and named <= known


def test_a_result_names_its_commit_if_it_is_not_older_than_commits_in_results() -> None:
    readme = (RESULTS / "README.md").read_text(encoding="utf-8")
    dated: dict[str, list[str]] = {}
    for file in RESULTS.glob("20*"):
        if file.suffix != ".png":
            dated.setdefault(file.stem, []).append(file.read_text(encoding="utf-8"))
    lacking = [stem for stem, texts in dated.items() if not any(map(COMMIT.search, texts))]
    later = [stem for stem in lacking if stem >= COMMITS_SINCE]
    assert [stem for stem in later if f"`{stem}`" not in readme] == []
