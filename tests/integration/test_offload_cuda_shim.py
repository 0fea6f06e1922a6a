"""The CUDA allocator compiles against the installed PyTorch, goes in and out without a driver, and
serves planned addresses: the native allocator is played by one over the machine's own memory."""

import ctypes
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.memory import cuda_shim
from offload.memory.compilation import COMPILERS, build_and_load, compile_to
from offload.memory.cpu_shim import Shim, open_shim
from offload.memory.cuda_shim import headers

CUDA = torch.device("cuda", 0)
HEADERS = headers(cuda_shim._header_folders())
COMPILER = next(filter(None, map(shutil.which, COMPILERS)), "")
BUILDS = pytest.mark.skipif(
    isinstance(HEADERS, str) or not COMPILER, reason=f"needs CUDA's headers: {HEADERS}"
)
FAKE = Path(__file__).parent / "fake_cuda_allocator.cpp"


def never(result: object) -> bool:
    return False


class Ops:
    """What a kernel on the device asks of the allocator."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self.library = library
        for name in ("op_tensor", "op_address", "op_raw", "op_raw_on_stream"):
            getattr(library, name).restype = ctypes.c_void_p
        for name in ("op_tensor", "op_raw", "op_raw_on_stream"):
            getattr(library, name).argtypes = (ctypes.c_uint64,)
        for name in ("op_address", "op_device", "op_stream", "op_drop", "op_raw_drop"):
            getattr(library, name).argtypes = (ctypes.c_void_p,)
        for name in ("fake_living", "fake_streams"):
            getattr(library, name).restype = ctypes.c_int64
        library.op_fraction.restype = ctypes.c_double

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("shim")
    assert isinstance(HEADERS, Path)
    made = cuda_shim.recipe(HEADERS)
    placed, fake = folder / "placed.so", folder / "fake.so"
    compile_to(placed, made.command(COMPILER))
    compile_to(fake, replace(made, source=FAKE).command(COMPILER))
    return placed, fake


@pytest.fixture
def ops(libraries: tuple[Path, Path]) -> Iterator[Ops]:
    """A fake native allocator in the process; what was there comes back at the end."""
    found = Ops(ctypes.PyDLL(str(libraries[1])))
    found.fake_begin()
    yield found
    found.fake_end()
    assert found.fake_living() == 0


@pytest.fixture
def placed(ops: Ops, libraries: tuple[Path, Path]) -> Iterator[Shim]:
    found = open_shim(libraries[0])
    yield found
    found.ask("placed_uninstall")


@BUILDS
@pytest.mark.full
def test_it_compiles_against_this_pytorch_and_goes_in_and_out_without_a_driver(
    tmp_path: Path,
) -> None:
    found = cuda_shim.built(COMPILERS, tmp_path, HEADERS)
    assert isinstance(found, Shim), found
    assert found.ask("placed_installed") == 2
    assert torch.cuda.get_allocator_backend() == "native"  # it answers for what it wraps
    found.ask("placed_uninstall")
    assert found.ask("placed_installed") == 0
    assert open_shim(found.path).ask("placed_installed") == 2
    found.ask("placed_uninstall")


@BUILDS
@pytest.mark.full
def test_allocations_of_a_bound_call_get_the_planned_addresses(placed: Shim, ops: Ops) -> None:
    arena = ctypes.create_string_buffer(256)
    base = ctypes.addressof(arena)
    found: list[tuple[int, int]] = []

    def call() -> None:
        tensors = [ops.op_tensor(nbytes) for nbytes in (64, 32, 128)]
        found.extend((ops.op_address(t), ops.op_device(t)) for t in tensors)
        for tensor in tensors:
            ops.op_drop(tensor)

    placed.bind(call, [(64, base), (32, base + 64), (128, base + 128)], never, device=3)()
    assert found == [(base, 3), (base + 64, 3), (base + 128, 3)]
    found.clear()
    call()
    assert all(not base <= address < base + 256 for address, _ in found)


@BUILDS
@pytest.mark.full
def test_raw_allocations_are_served_and_their_frees_ignored(placed: Shim, ops: Ops) -> None:
    arena = ctypes.create_string_buffer(128)
    base = ctypes.addressof(arena)
    found: list[int] = []

    def call() -> None:
        found.append(ops.op_raw(64))
        ops.op_raw_drop(found[-1])
        found.append(ops.op_raw_on_stream(32))
        ops.op_raw_drop(found[-1])

    run = placed.bind(call, [(64, base), (32, base + 64)], never)
    run()
    run()
    assert found == [base, base + 64] * 2
    assert ops.fake_living() == 0


@BUILDS
@pytest.mark.full
def test_a_size_that_does_not_fit_goes_to_the_native_allocator_and_is_told(
    placed: Shim, ops: Ops
) -> None:
    arena = ctypes.create_string_buffer(64)
    base = ctypes.addressof(arena)
    asked: list[int] = []
    settled: list[object] = []

    def call() -> int:
        tensor = ops.op_tensor(asked[-1])
        address = ops.op_address(tensor)
        ops.op_drop(tensor)
        return address

    def settle(result: object) -> bool:
        settled.append(result)
        return False

    run = placed.bind(call, [(64, base)], settle)
    for nbytes in (64, 64, 32):
        asked.append(nbytes)
        run()
    assert settled[0] == base  # the first run is seen, the second is not
    assert len(settled) == 2
    assert settled[1] != base
    assert ops.fake_living() == 0


@BUILDS
@pytest.mark.full
def test_a_call_is_recorded_with_sizes_addresses_and_frees(placed: Shim, ops: Ops) -> None:
    def call() -> list[int]:
        hidden = ops.op_raw(48)
        tensor = ops.op_tensor(64)
        ops.op_raw_drop(hidden)
        kept.append(tensor)
        return [hidden, ops.op_address(tensor)]

    kept: list[int] = []

    def look(found: list[int]) -> list[int]:
        ops.op_drop(kept.pop())
        return found

    (hidden, output), log = placed.record(call, look)
    assert [(e.address, e.nbytes) for e in log.events] == [
        (hidden, 48),
        (output, 64),
        (hidden, 0),
        (output, 0),
    ]
    assert (log.returned, log.elsewhere) == (3, 0)


@BUILDS
@pytest.mark.full
def test_bytes_outside_of_the_arenas_are_counted_and_freed_ones_are_not_live(
    placed: Shim, ops: Ops
) -> None:
    arena = ctypes.create_string_buffer(64)
    with placed.counting() as passed:
        tensor, raw = ops.op_tensor(100), ops.op_raw(50)
        placed.bind(
            lambda: ops.op_drop(ops.op_tensor(64)), [(64, ctypes.addressof(arena))], never
        )()
        assert (passed.live, passed.allocations) == (150, 2)
        ops.op_raw_drop(raw)
        ops.op_drop(tensor)
        assert (passed.live, passed.peak) == (0, 150)


@BUILDS
@pytest.mark.full
def test_streams_are_noted_for_watched_memory_too(placed: Shim, ops: Ops) -> None:
    before = ops.fake_streams()
    plain = ops.op_tensor(64)
    with placed.counting():
        watched = ops.op_tensor(64)
        for tensor in (plain, watched):
            ops.op_stream(tensor)
    assert ops.fake_streams() - before == 2
    ops.op_drop(plain)
    ops.op_drop(watched)


@BUILDS
@pytest.mark.full
def test_what_it_does_not_do_itself_is_asked_of_the_native_allocator(
    placed: Shim, ops: Ops
) -> None:
    assert ops.op_fraction() == 0.25


@BUILDS
@pytest.mark.full
def test_another_allocator_over_it_is_seen(placed: Shim, ops: Ops) -> None:
    ops.fake_begin()  # takes its place in one of the two registers
    assert placed.ask("placed_installed") == 1
    ops.library.fake_end()
    assert placed.ask("placed_installed") == 2


@pytest.mark.skipif(isinstance(HEADERS, str), reason="needs CUDA's headers")
def test_every_function_of_the_allocator_is_handed_on() -> None:
    home = Path(torch.__file__).parent / "include" / "c10"
    declared = set()
    for header, name in (
        ("cuda/CUDACachingAllocator.h", "class CUDAAllocator"),
        ("core/CachingDeviceAllocator.h", "struct C10_API DeviceAllocator"),
        ("core/Allocator.h", "struct C10_API Allocator"),
    ):
        text = (home / header).read_text()
        body = text[text.index(name) :]
        body = body[: body.index("\n};")]
        declared |= {
            found[1] for found in re.finditer(r"virtual [^;{(]*?[ *&](\w+)\(", body, re.DOTALL)
        }
    assert {"allocate", "raw_alloc", "snapshot", "memcpyAsync", "recordStream"} <= declared
    ours = cuda_shim.SOURCE.read_text()
    missing = {name for name in declared if not re.search(rf"\b{name}\(", ours)}
    assert missing - {"Allocator", "DeviceAllocator", "AllocatorState"} == set()


def test_headers_of_the_cuda_that_pytorch_was_built_with_go_first(tmp_path: Path) -> None:
    places = []
    for name, version in (("old", 12080), ("new", 13000), ("newer", 13020)):
        place = tmp_path / name
        (place / "crt").mkdir(parents=True)
        for needed in cuda_shim.NEEDED:
            (place / needed).write_text(f"#define CUDART_VERSION  {version}\n")
        places.append(place)
    assert headers(places, "13.0") == places[1]
    assert headers(places, "11.8") == places[0]
    (places[1] / "crt" / "host_config.h").unlink()
    assert headers(places, "13.0") == places[2]


def test_missing_headers_are_named_with_the_places_that_were_sought(tmp_path: Path) -> None:
    why = headers([tmp_path / "a", tmp_path / "b"], "13.0")
    assert isinstance(why, str)
    assert "crt/host_config.h" in why
    assert str(tmp_path / "b") in why
    assert "Install the CUDA toolkit 13.0" in why
    assert cuda_shim.built(COMPILERS, tmp_path, why) == why


def test_a_pytorch_without_cuda_has_no_shim_for_it(tmp_path: Path) -> None:
    assert "was built without CUDA" in str(headers([tmp_path], None))


def test_an_allocator_that_cannot_be_wrapped_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def __getattr__(self, name: str) -> Any:
            function = type("F", (), {"__call__": lambda self, *a: 1})()
            setattr(self, name, function)
            return function

    def load(path: Path) -> Shim:
        return Shim(Library(), path)  # pyright: ignore[reportArgumentType]

    fake = tmp_path / "c++"
    fake.write_text('#!/bin/sh\nfor last; do :; done\necho x > "$last"\n')
    fake.chmod(0o755)
    why = build_and_load(cuda_shim.recipe(tmp_path), load, [str(fake)], tmp_path)
    assert "caching allocator is not in use" in str(why)
