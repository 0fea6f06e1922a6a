"""benchmarks/gpu/memory_watch.py: the most that was taken between two looks of the caller."""

from pathlib import Path
from threading import Event

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def watch_module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu.memory_watch as module

    return module


def test_a_rise_that_is_over_before_the_caller_looks_is_seen(watch_module) -> None:
    seen, taken = Event(), [5]

    def used() -> int:
        if taken[0] == 70:
            seen.set()
        return taken[0]

    with watch_module.MemoryWatch(used, period=0.0001) as watch:
        taken[0] = 70
        assert seen.wait(60)
        taken[0] = 6
        assert watch.most() == 70
        assert watch.begin() == 6
        assert watch.most() == 6


def test_a_count_that_fails_is_no_peak_of_nothing(watch_module) -> None:
    calls, failed = [0], Event()

    def used() -> int:
        calls[0] += 1
        if calls[0] > 1:
            failed.set()
            raise OSError("the driver is gone")
        return 1

    with watch_module.MemoryWatch(used, period=0.0001) as watch:
        assert failed.wait(60)
        watch._thread.join(60)
        with pytest.raises(RuntimeError, match="could not be watched"):
            watch.most()


def test_the_resident_set_of_this_process_is_read(watch_module) -> None:
    if not watch_module.STATUS.is_file():
        pytest.skip("no /proc here")
    assert 10 << 20 < watch_module.resident() < 1 << 40
    assert watch_module.counter("cpu")[0] == "resident set"


@pytest.mark.parametrize(
    ("library", "who"), (("libc.so.6", "NVML"), ("libnothing.so.1", "cudaMemGetInfo"))
)
def test_nvml_counts_where_its_module_and_its_library_are_there(
    watch_module, monkeypatch: pytest.MonkeyPatch, library: str, who: str
) -> None:
    monkeypatch.setattr(watch_module.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(watch_module, "NVML", library)
    assert watch_module.counter("cuda")[0] == who
