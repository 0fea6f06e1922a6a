"""compute-sanitizer over a small plan: no byte is touched that nobody has, no barrier is misused.

It sees memory and shared memory, not the order of two streams: what that must be is proven by
`verify` and attacked by the delays of test_streams.py.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_gpu import not_on_a_fake_gpu

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parents[1] / "support" / "sanitized_plan.py"
TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
FOUND = 99
"""What it exits with if it found something."""
ENGINES = ("cuda", "cudagraph")


def ran(*command: str) -> str:
    done = subprocess.run(
        [*command], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.gpu
@pytest.mark.full
def test_the_small_plan_gives_the_same_loss_by_both_engines() -> None:
    """The script is right before anybody needs it."""
    losses = {ran(sys.executable, str(SCRIPT), "cuda:0", engine).split()[-1] for engine in ENGINES}
    assert len(losses) == 1 and float(losses.pop()) > 0


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@not_on_a_fake_gpu("it has no compiled kernels to look into")
def test_compute_sanitizer_finds_nothing(engine: str, tool: str) -> None:
    found = shutil.which("compute-sanitizer") or next(
        filter(None, (shutil.which("compute-sanitizer", path=p) for p in TOOLKITS)), None
    )
    if found is None:
        pytest.skip(f"compute-sanitizer is neither in PATH nor in {', '.join(TOOLKITS)}")
    options = ("--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all")
    ran(found, *options, sys.executable, str(SCRIPT), "cuda:0", engine)
