"""fakecuda/: where the fake GPU is not loaded, and what is said then."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakecuda import build

HERE = Path(build.__file__).parent
LOADED = "import os; print('FAKE_CUDA' in os.environ)"
DRIVERS = {
    "none": "int cuInit(unsigned flags) { return 100; }",
    "one": "int cuInit(unsigned flags) { return 0; }"
    " int cuDeviceGetCount(int *count) { *count = 1; return 0; }",
}


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True
    )


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """What stands for a real driver, with no device or with one, and its folder."""
    if sys.platform != "linux" or not shutil.which("g++"):
        pytest.skip("it plays Linux's driver, and g++ compiles it")
    source = tmp_path / "driver.c"
    source.write_text(DRIVERS[request.param], encoding="utf-8")
    command = ["g++", "-x", "c", "-shared", "-fPIC", source, "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(command, check=True)
    return request.param, tmp_path


def test_a_machine_with_a_driver_never_gets_the_fake(driver: tuple[str, Path]) -> None:
    devices, folder = driver
    done = run(HERE / "on_gpu.py", sys.executable, "-c", LOADED, LD_LIBRARY_PATH=str(folder))
    if devices == "one":
        assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
        assert "on this machine's GPU, one of 1" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert "a driver of NVIDIA is installed, but has no device" in done.stderr


def test_a_process_that_is_told_to_load_it_beside_a_driver_ends(driver: tuple[str, Path]) -> None:
    _, folder = driver
    done = run(
        "-c", LOADED,
        LD_LIBRARY_PATH=str(folder), FAKE_CUDA=str(folder), PYTHONPATH=str(HERE / "site"),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "a real libcuda.so.1 is installed here" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the fake plays Linux's driver")
def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run("-c", LOADED, FAKE_CUDA=str(tmp_path / "no"), PYTHONPATH=str(HERE / "site"))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"FAKE_CUDA={tmp_path}/no is no folder" in done.stderr
