"""`make slow-tests` lists what is dear, and fails nothing."""

import subprocess
import sys
from pathlib import Path

RUN = """
import sys
import pytest
from support import slow_tests

clock = [0.0]
slow_tests.spent, slow_tests.calibrate = lambda: clock[0], lambda: 0.5
given = ["-p", "no:cacheprovider", "--rootdir", ".", "test_two.py"]
sys.exit(pytest.main(given, plugins=[slow_tests.SlowTests()]))
"""
TESTS = """
import pytest, __main__

@pytest.fixture
def dear():
    __main__.clock[0] += 8

def test_cheap():
    pass

def test_dear(dear):
    __main__.clock[0] += 2
"""


def test_a_dear_test_is_listed_first_in_units_of_the_loop_and_none_fails(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TESTS)
    ran = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout and "1.0 is 0.50 CPU seconds here" in ran.stdout
    listed = ran.stdout.split("all tests\n")[1].splitlines()
    assert listed[:2] == ["    20.0  test_two.py::test_dear", "     0.0  test_two.py::test_cheap"]
