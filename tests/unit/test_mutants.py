"""The lists of mutants are alive: each fault can still be put into the source as it is now."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LEAST = {"offload": 20, "loaders": 12, "trainers": 8, "perfect": 6}


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tests/mutants/run.py."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "mutants"))
    return importlib.import_module("run")


@pytest.mark.parametrize("package", LEAST)
def test_every_mutant_can_be_put_into_its_file(mutants: Any, package: str) -> None:
    for one in (mutant for mutant in mutants.read() if mutant.file.startswith(f"{package}/")):
        mutated = one.applied_to((ROOT / one.file).read_text(encoding="utf-8"))
        assert one.new != one.old, one.name
        if one.file.endswith(".py"):
            compile(mutated, one.file, "exec")


def test_every_mutant_has_a_name_of_its_own_and_a_file_of_its_list(mutants: Any) -> None:
    names = Counter(one.name for one in mutants.read())
    assert [name for name, count in names.items() if count > 1] == []
    for package in LEAST:
        text = (ROOT / "tests" / "mutants" / f"{package}.toml").read_text(encoding="utf-8")
        files = [line for line in text.splitlines() if line.startswith("file = ")]
        assert [line for line in files if not line.startswith(f'file = "{package}/')] == []


def test_faults_of_cuda_code_run_on_the_fake_gpu(mutants: Any) -> None:
    faults = [one for one in mutants.read() if one.fake_gpu]
    assert len(faults) >= 10
    assert {one.fake_gpu for one in faults} == set(mutants.GPU_TIERS)


def test_there_are_enough_of_every_package(mutants: Any) -> None:
    found = Counter(one.file.split("/")[0] for one in mutants.read())
    assert set(found) == set(LEAST)
    for package, least in LEAST.items():
        assert found[package] >= least, package


def test_every_suspect_is_a_file_of_tests(mutants: Any) -> None:
    for one in mutants.read():
        assert one.suspects, one.name
        for glob in one.suspects:
            assert mutants.files_of([glob], ROOT / "tests"), f"{one.name}: {glob}"


def test_a_mutant_whose_lines_have_changed_is_told_with_its_file(mutants: Any) -> None:
    fault = mutants.Mutant(
        "a fault", "offload/plans/plan.py", "a = 1", "a = 2", ("unit/test_x.py",)
    )
    assert fault.applied_to("a = 1\n") == "a = 2\n"
    for source, count in (("b = 1\n", 0), ("a = 1\na = 1\n", 2)):
        said = rf"'a fault': its `old` stands {count} times in offload/plans/plan\.py"
        with pytest.raises(ValueError, match=said):
            fault.applied_to(source)
