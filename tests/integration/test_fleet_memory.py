"""Jobs wait for memory, and take no more than they were given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak as Linux tells it")
def test_twelve_jobs_stay_within_the_hosts_budget_and_some_wait() -> None:
    program = ROOT / "tests" / "support" / "fleet_memory_run.py"
    done = subprocess.run(
        [sys.executable, str(program), "500MiB"],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    most, at_once = map(int, done.stdout.split())
    assert most <= 500 * MIB, f"{most / MIB:.0f} MiB, {at_once} jobs at once"
    assert 3 <= at_once < 12, "some jobs waited, and not all but one"
