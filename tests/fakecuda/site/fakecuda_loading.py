"""Loads the fake GPU into this process: its libraries before torch, its ops after."""

import ctypes
import os
from pathlib import Path

DRIVER = "libcuda.so.1"


def load_runtime() -> None:
    """Before torch: the driver and the runtime."""
    folder = Path(os.environ["FAKE_CUDA"])
    if not folder.is_dir():
        raise SystemExit(f"FAKE_CUDA={folder} is no folder: give the one that build.py prints")
    if _real_driver():
        raise SystemExit(
            f"FAKE_CUDA={folder}: a real {DRIVER} is installed here, and the fake GPU is not "
            "loaded beside it: unset FAKE_CUDA"
        )
    for library in (folder / DRIVER, *folder.glob("libcudart.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def install_ops() -> None:
    """After torch, which calls this: site/fakecuda-1.dist-info names it as one of its backends."""
    if os.environ.get("FAKE_CUDA"):
        ctypes.CDLL(os.path.join(os.environ["FAKE_CUDA"], "libfakeops.so")).fakecuda_install_ops()


def _real_driver() -> bool:
    """Nobody has loaded the fake one yet: what the linker finds is real."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True
