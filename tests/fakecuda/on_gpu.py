"""Runs a command on this machine's GPU, or, where there is none, on the fake one.

python tests/fakecuda/on_gpu.py python -m pytest -m gpu tests
"""

import ctypes
import os
import sys
from pathlib import Path

from build import BuildError, build

SITE = Path(__file__).resolve().parent / "site"
SUCCESS = 0
MODES = ("FAKE_CUDA_ASYNC", "FAKE_CUDA_SHUFFLE")


def devices() -> int | None:
    """The number of GPUs that the driver has, or None if no driver is installed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int(0)
    if driver.cuInit(0) != SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != SUCCESS:
        return 0
    return count.value


def environment(folder: Path) -> dict[str, str]:
    """What a process needs to be on the fake GPU that was built into `folder`."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "FAKE_CUDA": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def main(command: list[str]) -> None:
    if not command:
        sys.exit(__doc__)
    real = devices()
    if real == 0:
        sys.exit(
            "on_gpu.py: a driver of NVIDIA is installed, but has no device: the fake GPU is not "
            "loaded beside it. Make a device visible, or remove the driver."
        )
    if real and (mode := next(filter(os.environ.get, MODES), None)):
        print(f"on_gpu.py: {mode} is for the fake GPU: nothing runs", file=sys.stderr)
        return
    if real:
        print(f"on_gpu.py: on this machine's GPU, one of {real}", file=sys.stderr)
        os.execvp(command[0], command)
    try:
        folder = build()
    except BuildError as error:
        sys.exit(f"on_gpu.py: there is no GPU here, and {error}")
    print(f"on_gpu.py: on the fake GPU in {folder}", file=sys.stderr)
    os.execvpe(command[0], command, environment(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
