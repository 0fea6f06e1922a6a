"""benchmarks/gpu/quarter.sh: every part has its time, all is packed, and the lists name tests."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"
LISTS = (GPU / "canaries.txt", GPU / "alone.txt")
pytestmark = pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")

STUB = """#!/bin/bash
echo "$*" >> {said}
case "$*" in
  *test_fleet.py*) exit {canaries} ;;
esac
"""
"""A Python that runs nothing. Its canaries end as they are told to."""


def script(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    places = {
        "STATE": str(folder / "state"), "OUT": str(folder / "out"), "COMMIT": "0123abc",
        "CARRIED": str(folder / "carried"),
    }  # fmt: skip
    own = {name: it for name, it in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.Popen(
        ["bash", *words], cwd=ROOT, env={**own, **places, **more}, text=True,
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
    assert "--tb=long" in next(
        line for line in said.read_text().splitlines() if "-m pytest" in line
    )
    assert packed(tmp_path, "arrive.log").startswith("commit 0123abc\n")


@pytest.mark.parametrize("outcome", ("passed", "failed"))
def test_canaries_that_are_over_their_time_are_judged_by_those_that_ended(
    outcome: str, tmp_path: Path
) -> None:
    said, _ = lines(
        tmp_path,
        'for part in others alone ceilings lora peaks; do eval "$part() { :; }"; done;'
        f"canaries() {{ printf '{outcome}\\ta\\n' > $state/outcomes.tsv; sleep 1000; }};"
        "GRACE=1; SECONDS=85; first",
    ).communicate()
    parts = [line.split("\t")[:2] for line in packed(tmp_path, "parts.tsv").splitlines()]
    assert parts[1] == ["canaries", "ended: it was over its time"], said
    numbers = ["ceilings", "lora", "peaks"] if outcome == "passed" else []
    assert parts[2:] == [[part, "good"] for part in ("tests", "alone", *numbers)]


CELLS = """#!{python}
import json, sys
given = json.loads(sys.stdin.read())
folder, stem = given["store"]
for cell in given["job"]["cells"]:
    if cell == "b":
        sys.exit(1)
    with open(f"{{folder}}/{{stem}}.jsonl", "a") as rows:
        rows.write(json.dumps({{"cell": cell, "row": {{"rounds": 1}}}}) + "\\n")
"""
"""A process of the GPU suite in which the second cell ends the process."""


def test_cells_behind_one_that_fails_are_measured(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text(CELLS.format(python=sys.executable))
    stub.chmod(0o755)
    commands = f"python={stub}; commit > $state/commit; part some 1000 measure some run a b c"
    said, _ = lines(tmp_path, commands).communicate()
    rows = [json.loads(line) for line in packed(tmp_path, "gpu_some.jsonl").splitlines()]
    assert [row["cell"] for row in rows] == ["a", "c"], said
    assert packed(tmp_path, "parts.tsv").split("\t")[:2] == ["some", "failed with status 1"]


def test_a_carried_wheel_is_unpacked_where_the_machine_lacks_it(tmp_path: Path) -> None:
    wheels = tmp_path / "carried" / "few"
    wheels.mkdir(parents=True)
    for name in ("lacking", "pytest"):
        with zipfile.ZipFile(wheels / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}_carried.py", "")
    said, _ = lines(tmp_path, f"python={sys.executable}; unpack").communicate()
    assert [file.name for file in (tmp_path / "state.site").iterdir()] == ["lacking_carried.py"], (
        said
    )


def test_a_checkout_that_is_not_what_was_prepared_is_told(tmp_path: Path) -> None:
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "commit").write_text("89ab\n")
    there = tmp_path / "there"
    there.write_text("as it was")
    commands = f"cd {tmp_path}; sha256sum there > carried/sources; COMMIT= commit;"
    said, _ = lines(tmp_path, f"{commands} echo else > there; COMMIT= commit").communicate()
    assert [line for line in said.splitlines() if "89ab" in line] == ["89ab", "89ab-changed"]


def test_the_second_call_runs_what_failed_in_the_first_one(tmp_path: Path) -> None:
    state, said, stub = tmp_path / "state", tmp_path / "said", tmp_path / "python"
    state.mkdir()
    stub.write_text(STUB.format(said=said, canaries=0))
    stub.chmod(0o755)
    canaries = [line for line in LISTS[0].read_text().splitlines() if line.startswith("tests")]
    ended = [f"passed\t{test}" for test in (*canaries[1:], "tests/a.py::test_a")]
    ended.append("failed\ttests/a.py::test_b[all bfloat16-0]")
    (state / "outcomes.tsv").write_text("\n".join(ended) + "\n")
    script(tmp_path, str(GPU / "quarter.sh"), "again", PYTHON=str(stub)).communicate()
    (line,) = said.read_text().splitlines()
    again = sorted(("tests/a.py::test_b[all bfloat16-0]", canaries[0]))
    assert line.endswith(f"--showlocals {' '.join(again)}")


@pytest.mark.cold
def test_a_test_that_failed_is_written_down_before_one_that_hangs_is_ended(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import time\nfrom pytest import mark as marked\npytestmark = marked.gpu\n"
        "def test_bad(): assert 6 == 7\n"
        "def test_hangs():\n    while True: time.sleep(1)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: stub\n")
    process = lines(
        tmp_path, f"python={sys.executable}; trap end TERM; part t 1000 tests 1 {tests}"
    )
    outcomes = tmp_path / "state" / "outcomes.tsv"
    eventually(lambda: outcomes.exists() and bool(outcomes.stat().st_size))
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert packed(tmp_path, "outcomes.tsv").startswith("failed\t")
    assert "assert 6 == 7" in packed(tmp_path, "failures.txt")


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
