"""benchmarks/gpu/wheels.sh and what it writes, with an index and a pip of our own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
STUB = """#!{python}
import os, pathlib, random, shutil, sys
words = sys.argv[1:]
def after(flag):
    return pathlib.Path(words[words.index(flag) + 1])
if words[:3] == ["-m", "pip", "download"]:
    for asked in (word for word in words if "==" in word):
        name, version = asked.replace("-", "_").split("==")
        if name == os.environ.get("GONE"):
            sys.exit(f"ERROR: No matching distribution found for {{asked}}")
        size = 2_700_000 if name == "nvidia_dali_cuda130" else 100
        wheel = after("-d") / f"{{name}}-{{version}}-py3-none-any.whl"
        wheel.write_bytes(random.Random(asked).randbytes(size))
elif words[:3] == ["-m", "pip", "install"]:
    for wheel in (word for word in words if word.endswith(".whl")):
        shutil.copy(wheel, os.environ["SITE"])
elif words[:1] == ["-c"] and "importlib.metadata" in words[1]:
    sys.exit(words[2] != "six")  # the machine has one of them
elif words[:1] == ["-c"]:
    sys.exit(words[2] == os.environ.get("BROKEN") and f"ImportError: no {{words[2]}}")
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """With `python`, and `site` for what is installed."""
    stub = tmp_path / "python"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    (tmp_path / "site").mkdir()
    return tmp_path


def bash(script: Path, machine: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *words], capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "PYTHON": str(machine / "python"),
             "SITE": str(machine / "site"), **more},
    )  # fmt: skip


def gather(machine: Path, part: str, **more: str) -> subprocess.CompletedProcess[str]:
    return bash(SUITE / "wheels.sh", machine, part, str(machine / "there"), **more)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {wheel.name: wheel.read_bytes() for wheel in folder.glob("*.whl")}


def test_what_came_in_pieces_is_installed_as_it_was_gathered(machine: Path) -> None:
    there = machine / "there" / "dali"
    assert gather(machine, "dali").returncode == 0
    whole = bytes_of(there)
    assert len(whole) == 13
    # Smaller pieces, then larger ones: none of the former stays.
    for limit, pieces in (("1", 4), ("2", 2)):
        done = gather(machine, "dali", LIMIT_MB=limit)
        assert done.returncode == 0, done.stderr
        assert "does not travel in one go" in done.stdout
        files = list(there.iterdir())
        assert max(file.stat().st_size for file in files) < int(limit) * 1_000_000
        assert sum(".whl.piece" in file.name for file in files) == pieces
    done = bash(there / "install.sh", machine)
    assert done.returncode == 0, done.stderr
    assert "nvidia.dali works" in done.stdout
    installed = bytes_of(machine / "site")
    assert installed == {name: held for name, held in whole.items() if not name.startswith("six")}


def test_a_piece_that_did_not_arrive_is_told_and_nothing_is_installed(machine: Path) -> None:
    there = machine / "there" / "dali"
    gather(machine, "dali", LIMIT_MB="1")
    next(there.glob("*.piece02")).unlink()
    done = bash(there / "install.sh", machine)
    assert done.returncode == 1
    assert "nvidia_dali_cuda130" in done.stdout + done.stderr
    assert "copy it again" in done.stderr
    assert bytes_of(machine / "site") == {}


def test_a_download_that_failed_is_told_and_leaves_nothing_to_install(machine: Path) -> None:
    gather(machine, "roundpipe")
    install = machine / "there" / "roundpipe" / "install.sh"
    assert install.is_file()
    done = gather(machine, "roundpipe", GONE="beartype")
    assert done.returncode != 0
    assert "No matching distribution found for beartype" in done.stderr
    assert not install.exists()


def test_a_package_that_does_not_work_there_is_told_with_its_last_words(machine: Path) -> None:
    gather(machine, "roundpipe")
    done = bash(machine / "there" / "roundpipe" / "install.sh", machine, BROKEN="roundpipe")
    assert done.returncode == 1
    assert "roundpipe does not work: ImportError: no roundpipe" in done.stdout


def test_a_part_that_there_is_not_is_told(machine: Path) -> None:
    done = gather(machine, "torch")
    assert done.returncode == 2
    assert "no part torch: few, core, peers, roundpipe, dali" in done.stderr


@pytest.mark.parametrize("script", ["run.sh", "wheels.sh"])
def test_the_scripts_are_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n", SUITE / script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
