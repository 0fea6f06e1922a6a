"""The allocator over PyTorch's own: what it serves, records, counts, and leaves alone."""

import functools
import itertools
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import OffloadError
from offload.memory import cpu_shim as shim
from offload.memory.cpu_shim import Shim
from offload.memory.placement import COPY, SHIM, choose_placement

Run = Callable[[], object]
PLACED = pytest.mark.skipif(shim.available() is None, reason=shim.why_not() or "there is one")


@pytest.fixture
def placed() -> Shim:
    return shim.load()


@pytest.fixture
def arena() -> torch.Tensor:
    return torch.zeros(1 << 16, dtype=torch.uint8)


def fill(value: float, numel: int = 16) -> Run:
    return functools.partial(torch.full, (numel,), value)


def content(arena: torch.Tensor, offset: int, numel: int = 16) -> list[float]:
    return arena[offset : offset + 4 * numel].view(torch.float32).tolist()


def content_is(arena: torch.Tensor, offset: int, value: float) -> bool:
    return content(arena, offset) == [value] * 16


def never(result: Any) -> bool:
    return False


@PLACED
def test_each_allocation_of_a_call_gets_the_address_of_its_slot(
    placed: Shim, arena: torch.Tensor
) -> None:
    def call() -> list[torch.Tensor]:
        return [torch.full((16,), 1.0), torch.full((32,), 2.0), torch.full((16,), 3.0)]

    base = arena.data_ptr()
    run = placed.bind(call, [(64, base), (128, base + 512), (64, base + 128)], never)
    run()
    assert content_is(arena, 0, 1.0)
    assert content(arena, 512, 32) == [2.0] * 32
    assert content_is(arena, 128, 3.0)


@PLACED
@pytest.mark.parametrize("slots", [[(65, 0)], [(63, 0)], [], [(64, 0), (64, 64)]])
def test_a_call_that_allocates_unlike_its_slots_is_told_every_time(
    slots: list[tuple[int, int]], placed: Shim, arena: torch.Tensor
) -> None:
    told: list[list[float]] = []

    def settle(result: torch.Tensor) -> bool:
        told.append(result.tolist())
        return False

    base = arena.data_ptr()
    run = placed.bind(fill(5.0), [(nbytes, base + at) for nbytes, at in slots], settle)
    for _ in range(3):
        run()
    assert told == [[5.0] * 16] * 3
    fitting = len(slots) == 2
    assert content_is(arena, 0, 5.0 if fitting else 0.0)


@PLACED
def test_an_exception_of_a_call_arrives_and_leaves_nothing_served(
    placed: Shim, arena: torch.Tensor
) -> None:
    def call() -> None:
        torch.full((16,), 1.0)
        raise LookupError("of the kernel")

    base = arena.data_ptr()
    run = placed.bind(call, [(64, base), (64, base + 64)], never)
    for _ in range(2):
        with pytest.raises(LookupError, match="of the kernel"):
            run()
        assert torch.full((16,), 9.0).data_ptr() != base + 64
    wrong = placed.bind(functools.partial(torch.mm, arena, arena), [(64, base + 64)], never)
    with pytest.raises(RuntimeError, match="matrix"):
        wrong()
    assert torch.full((16,), 9.0).data_ptr() != base + 64
    refused = placed.bind(fill(1.0), [(64, base)], lambda result: 1 // 0 > 0)
    with pytest.raises(ZeroDivisionError):
        refused()
    assert not arena[64:].any()


@PLACED
def test_two_threads_are_served_at_once_each_its_own(placed: Shim) -> None:
    arenas = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(2)]
    start = threading.Barrier(2, timeout=60)
    wrong: list[Any] = []

    def work(number: int) -> None:
        base = arenas[number].data_ptr()
        x = torch.full((64, 64), float(number + 1))
        missed: list[Any] = []
        slots = [(1 << 14, base + 64)]
        run = placed.bind(
            functools.partial(torch.mm, x, x), slots, lambda r: bool(missed.append(r))
        )
        start.wait()
        for _ in range(500):
            run()
        y = arenas[number][64 : 64 + (1 << 14)].view(torch.float32)
        if len(missed) != 1 or not (y == 64.0 * (number + 1) ** 2).all():
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,), name=f"perfect-{n}") for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@PLACED
def test_a_record_tells_allocations_and_frees_in_order(placed: Shim) -> None:
    def call() -> torch.Tensor:
        hidden = torch.full((16,), 1.0)
        result = torch.full((32,), 2.0)
        del hidden
        return result

    where, log = placed.record(call, torch.Tensor.data_ptr)
    first, second, third, last = log.events
    assert [event.nbytes for event in log.events] == [64, 128, 0, 0]
    assert (third.address, last.address) == (first.address, second.address)
    assert second.address == where
    assert (log.returned, log.elsewhere) == (3, 0)


@PLACED
def test_a_convolution_may_free_what_it_was_served(placed: Shim) -> None:
    # oneDNN's scratch comes and goes by raw_allocate and raw_deallocate; its size is the CPU's.
    call = functools.partial(torch.conv2d, torch.ones(2, 8, 16, 16), torch.ones(16, 8, 3, 3))
    _, log = placed.record(call, never)
    sizes = [event.nbytes for event in log.events if event.nbytes]
    offsets = [0, *itertools.accumulate(-(-nbytes // 64) * 64 for nbytes in sizes)]
    arena = torch.zeros(offsets.pop(), dtype=torch.uint8)
    slots = [(n, arena.data_ptr() + at) for n, at in zip(sizes, offsets, strict=True)]
    told: list[bool] = []

    def settle(result: torch.Tensor) -> bool:
        told.append(bool((result == 72.0).all()))
        return True

    run = placed.bind(call, slots, settle)
    for _ in range(20):
        run()
    assert told == [True] * 20


@PLACED
def test_a_process_that_was_forked_is_served_too(placed: Shim, arena: torch.Tensor) -> None:
    script = """
import os, torch, functools
from offload.memory import cpu_shim as shim
arena = torch.zeros(64, dtype=torch.uint8)
call = functools.partial(torch.full, (16,), 1.0)
run = shim.load().bind(call, [(64, arena.data_ptr())], lambda result: False)
child = os.fork()
if not child:
    run()
    os._exit(0 if (arena.view(torch.float32) == 1).all() else 1)
assert os.waitpid(child, 0)[1] == 0
assert not arena.any()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def compiler(folder: Path, script: str) -> str:
    path = folder / "fake-compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_compiler_that_fails_is_told_with_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    fake = compiler(tmp_path, "echo 'x.cpp:1: error: no such header' >&2; exit 3")
    why = shim.build_shim([fake], tmp_path / "cache")
    assert isinstance(why, str)
    assert "exit code 3: x.cpp:1: error: no such header" in why
    assert fake in why
    assert not [*(tmp_path / "cache").iterdir()]


def test_without_a_shim_outputs_are_copied_and_the_reason_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shim.LIBRARY, "result", lambda: "no C++ compiler was found")
    assert shim.available() is None
    assert shim.why_not() == "no C++ compiler was found"
    assert choose_placement("auto") == COPY
    with pytest.raises(OffloadError, match="no C\\+\\+ compiler was found"):
        choose_placement(SHIM)


@PLACED
def test_what_was_built_is_found_by_the_next_process(tmp_path: Path) -> None:
    first = shim.build_shim(shim.COMPILERS, tmp_path)
    assert isinstance(first, Shim)
    built = first.path.stat()
    again = shim.build_shim(shim.COMPILERS, tmp_path)
    assert isinstance(again, Shim)
    assert again.path.stat() == built
    assert [p.name for p in tmp_path.iterdir()] == [first.path.name]


@PLACED
def test_several_processes_may_build_at_once(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from offload.memory import cpu_shim as shim
found = shim.build_shim(shim.COMPILERS, Path({str(tmp_path)!r}))
assert not isinstance(found, str), found
"""
    builds = [
        subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for build in builds:
        _, errors = build.communicate()
        assert build.returncode == 0, errors
    assert len([*tmp_path.iterdir()]) == 1
