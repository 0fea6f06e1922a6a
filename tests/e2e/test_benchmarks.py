"""Every benchmark can be imported; the slice of the accuracy study keeps the study's margins."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CIFAR10 = ROOT.parent / "shared" / "data"
IMPORTED = """
import importlib, sys
from pathlib import Path

root = Path.cwd()
folder = root / "benchmarks"
sys.path[:0] = [str(root), str(folder), str(folder / "elastic_peers")]
for file in sorted(folder.rglob("[!_]*.py")):
    try:
        importlib.import_module(".".join(file.relative_to(folder).with_suffix("").parts))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        ours = any((place / package).exists() for place in (root, folder))
        if ours or (folder / f"{package}.py").exists():
            raise
    print(file.stem)
"""
"""Imports each file; a package that is not installed is left to whoever runs the benchmark."""


def run_script(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_benchmark_can_be_imported_without_starting() -> None:
    files = sorted((ROOT / "benchmarks").rglob("[!_]*.py"))
    assert run_script("-c", IMPORTED).split() == [file.stem for file in files]


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_slice_of_the_study_keeps_its_margins(tmp_path: Path) -> None:
    if not (CIFAR10 / "unpack_cifar10.py").exists():
        pytest.skip("CIFAR-10 is not beside the checkout (../shared/data)")
    unpack = subprocess.run(
        [sys.executable, str(CIFAR10 / "unpack_cifar10.py"), str(tmp_path / "data")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert unpack.returncode == 0, unpack.stderr
    said = run_script(
        "benchmarks/perfect_accuracy.py", "--preset", "slice",
        "--data", str(tmp_path / "data"), "--out", str(tmp_path),
    )  # fmt: skip
    line = next(line for line in said.splitlines() if line.startswith("reuse k3 re is"))
    over_no_reuse, over_plain_reuse = (float(word) for word in line.split() if word[0] in "+-")
    assert over_no_reuse >= 6.0
    assert over_plain_reuse >= 2.5
