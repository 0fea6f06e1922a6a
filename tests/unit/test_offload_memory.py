"""The host's arena of a plan for a device: page-locked, unlocked before its pages go. The device's
own calls are played; test_offload_device_memory_gpu.py has the real ones."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from offload.graph.memgraph import Place
from offload.graph.taskgraph import HOST
from offload.memory import arenas as memory
from offload.memory.arenas import Arenas
from offload.memory.pinned_arena import Runtime

CUDA = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What CUDA was asked, in order; `refuse` among it: it says no to locking."""
    found: list[str] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        found.append(f"lock {nbytes}")
        return 2 if "refuse" in found else 0

    def unregister(address: int) -> int:
        found.append("unlock")
        return 0

    runtime = Runtime(register, unregister, lambda code: "out of memory", lambda: None)
    monkeypatch.setattr(memory, "cuda_runtime", lambda device: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append("rest"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("empty cache"))
    yield found


def test_the_host_arena_of_a_device_is_locked_and_its_views_are_its_bytes(calls: list[str]) -> None:
    arenas = Arenas.allocate({HOST: 5000}, CUDA)
    assert calls == ["empty cache", "lock 5000"]
    assert not arenas.note
    place = Place(HOST, 64, 100)
    view = arenas.bytes(place)
    assert view.untyped_storage().nbytes() == 100
    assert view.data_ptr() == arenas.address(place)
    view.fill_(9)
    assert int(arenas.tensors[HOST].sum()) == 900


def test_it_is_unlocked_when_all_copies_are_over_and_before_its_pages_go(calls: list[str]) -> None:
    arenas = Arenas.allocate({HOST: 1 << 16}, CUDA)
    kept = Place(HOST, 0, 4096)
    arenas.tensors[HOST].fill_(5)
    del calls[:]
    arenas.forget(keep=[kept])
    assert calls == ["rest", "unlock"]
    assert int(arenas.bytes(kept).sum()) == 5 * 4096
    arenas.forget(keep=[])
    assert calls == ["rest", "unlock", "rest"]


def test_a_refused_lock_is_a_note_of_the_arenas(calls: list[str]) -> None:
    calls.append("refuse")
    with pytest.warns(RuntimeWarning, match="could not be page-locked"):
        arenas = Arenas.allocate({HOST: 4096}, CUDA)
    assert "CUDA error 2: out of memory" in arenas.note
    arenas.bytes(Place(HOST, 0, 4096)).fill_(1)


def test_on_the_cpu_nothing_is_asked_of_cuda(calls: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arenas = Arenas.allocate({0: 4096, HOST: 4096})
        arenas.synchronize()
        arenas.forget(keep=[])
    assert not calls
    assert not arenas.note
