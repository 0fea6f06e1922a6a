"""What every test gets: a leak police, and small data sets."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

SHARED_MEMORY = Path("/dev/shm")


def leaks() -> list[str]:
    """Threads, processes and shared memory of ours that are still there."""
    threads = [t.name for t in threading.enumerate() if t.name.startswith("perfect-")]
    processes = [f"process {p.name}" for p in multiprocessing.active_children()]
    mine = (f"torch_{os.getpid()}_", f"perfect-{os.getpid()}-")
    files = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []
    return threads + processes + [f"shared memory {f}" for f in files if f.startswith(mine)]


@pytest.fixture(autouse=True, scope="session")
def heard_ctrl_c() -> None:
    """What a shell puts into the background (`make test &`) is deaf to it, and so are its
    children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A decode thread, a process or shared memory that outlives its test is a leak."""
    yield
    if not leaks():
        return
    gc.collect()  # a generator that was left half way closes when it is collected
    deadline = time.monotonic() + 5
    while leaked := leaks():
        if time.monotonic() > deadline:
            pytest.fail(f"leaked: {', '.join(leaked)}")
        threading.Event().wait(0.02)


MakePictures = Callable[[Path, dict[str, int]], Path]


@pytest.fixture
def make_pictures() -> MakePictures:
    """`make(root, {"cat": 3, "dog": 2})` writes so many small JPEGs a class under `root`."""

    def make(root: Path, classes: dict[str, int], size: int = 16) -> Path:
        rng = np.random.default_rng(len(classes))
        for name, count in classes.items():
            (root / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
                data = simplejpeg.encode_jpeg(pixels, quality=90, colorspace="RGB")
                (root / name / f"{number:03}.jpg").write_bytes(data)
        return root

    return make
