"""What imports start, load and need, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold

ROOT = Path(__file__).parents[2]


def test_importing_perfect_starts_nothing_and_loads_no_plots() -> None:
    """In a process of its own. (Lightning loads matplotlib by itself; our plots must not.)"""
    script = """
import sys, threading
before = threading.active_count()
import perfect
import torch
assert threading.active_count() == before, threading.enumerate()
assert not torch.cuda.is_initialized()
late = {"perfect.report", "perfect.compare", "perfect.train"} & {*sys.modules}
assert not late, late
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_importing_the_backends_imports_no_backend() -> None:
    script = """
import sys
import loaders.backends.beton, loaders.backends.dali, loaders.backends.ffcv, loaders.convert
late = {"ffcv", "numba", "cv2", "nvidia.dali"} & {*sys.modules}
assert not late, late
"""
    subprocess.run([sys.executable, "-c", script], check=True)
