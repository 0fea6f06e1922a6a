"""benchmarks/gpu/quarter.sh: every part has its time, all is packed, and the lists name tests."""

import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"
LISTS = (GPU / "canaries.txt", GPU / "alone.txt")
pytestmark = pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")

STUB = """#!/bin/bash
echo "$*" >> {said}
case "$*" in
  *test_fleet_gpu*) exit {canaries} ;;
esac
"""
"""A Python that runs nothing. Its canaries end as they are told to."""


def script(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    places = {"STATE": str(folder / "state"), "OUT": str(folder / "out"), "COMMIT": "0123abc"}
    return subprocess.Popen(
        ["bash", *words], cwd=ROOT, env={**os.environ, **places, **more}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def lines(folder: Path, commands: str) -> subprocess.Popen[str]:
    """Lines of bash after those of the script, which begins no part itself."""
    return script(folder, "-c", f"source {GPU / 'quarter.sh'}; mkdir -p $state; {commands}")


def packed(folder: Path, name: str) -> str:
    with tarfile.open(folder / "out" / "all.tar.gz") as archive:
        file = archive.extractfile(f"./{name}")
        assert file is not None
        return file.read().decode()


def test_a_part_that_is_over_its_time_is_ended_and_the_next_one_begins(tmp_path: Path) -> None:
    said, _ = lines(
        tmp_path,
        "GRACE=1; part slow $((SECONDS + 4)) bash -c 'echo begun; sleep 1000 & sleep 1000';"
        "part next $((SECONDS + 1000)) echo here; part late $((SECONDS - 1)) echo never",
    ).communicate()
    parts = [line.split("\t")[:2] for line in packed(tmp_path, "parts.tsv").splitlines()[:2]]
    assert parts == [["slow", "ended: it was over its time"], ["next", "good"]], said
    assert packed(tmp_path, "slow.log") == "begun\n"
    assert packed(tmp_path, "next.log") == "here\n"
    assert "late\tnot begun" in said


def test_what_was_written_is_packed_when_the_script_is_ended(tmp_path: Path) -> None:
    process = lines(
        tmp_path,
        "trap end TERM; part good 1000 echo whole; part slow 1000 bash -c 'echo $$; sleep 1000'",
    )
    log = tmp_path / "state" / "slow.log"
    eventually(lambda: log.exists() and log.read_text().endswith("\n"))
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert packed(tmp_path, "good.log") == "whole\n"
    started = int(packed(tmp_path, "slow.log"))
    eventually(lambda: not Path(f"/proc/{started}").exists())


@pytest.mark.parametrize("canaries", (0, 1))
def test_numbers_are_measured_only_where_no_canary_failed(canaries: int, tmp_path: Path) -> None:
    said, stub = tmp_path / "said", tmp_path / "python"
    stub.write_text(STUB.format(said=said, canaries=canaries))
    stub.chmod(0o755)
    script(tmp_path, str(GPU / "quarter.sh"), PYTHON=str(stub)).communicate()
    parts = [line.split("\t")[0] for line in packed(tmp_path, "parts.tsv").splitlines()]
    numbers = [] if canaries else ["ceilings", "lora", "peaks"]
    assert parts == ["arrive", "canaries", "tests", "alone", *numbers]
    assert ("gpu.child" in said.read_text()) == (canaries == 0)
    assert "--tb=long" in next(line for line in said.read_text().splitlines() if "pytest" in line)
    assert packed(tmp_path, "arrive.log").startswith("commit 0123abc\n")


def test_the_second_call_runs_what_failed_in_the_first_one(tmp_path: Path) -> None:
    state, said, stub = tmp_path / "state", tmp_path / "said", tmp_path / "python"
    state.mkdir()
    stub.write_text(STUB.format(said=said, canaries=0))
    stub.chmod(0o755)
    (state / "tests.log").write_text(
        "[gw0] [ 50%] PASSED tests/a.py::test_a \n"
        "[gw1] [100%] FAILED tests/a.py::test_b[all bfloat16-0] \n"
        "FAILED tests/a.py::test_b[all bfloat16-0] - assert False\n"
    )
    script(tmp_path, str(GPU / "quarter.sh"), "again", PYTHON=str(stub)).communicate()
    (line,) = said.read_text().splitlines()
    assert line.endswith("--showlocals tests/a.py::test_b[all bfloat16-0]")


@pytest.mark.cold
def test_every_test_of_the_lists_is_there() -> None:
    listed = [
        line for path in LISTS for line in path.read_text().splitlines() if line.startswith("tests")
    ]
    assert len(listed) == len(set(listed)) > 20
    files = sorted({line.partition("::")[0] for line in listed})
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *files],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    there = set(done.stdout.splitlines())
    assert [line for line in listed if line not in there] == [], done.stderr
