"""Each fuzzer of tests/fuzz for 15 seconds: what comes from outside ends with no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FUZZERS = sorted((Path(__file__).parents[1] / "fuzz").glob("fuzz_*.py"))


@pytest.mark.parametrize("fuzzer", FUZZERS, ids=lambda path: path.stem)
def test_what_comes_from_outside_is_read_or_refused(fuzzer: Path) -> None:
    command = [sys.executable, "-m", f"fuzz.{fuzzer.stem}", "--seconds", "15", "--seed", "0"]
    tests = FUZZERS[0].parents[1]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tests,
        env=os.environ | {"PYTHONPATH": str(tests.parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert int(done.stdout.split()[0]) > 0
