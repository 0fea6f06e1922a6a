"""What may be taken of a device, who holds the rest, and what a plan is charged for besides its
arena: with the device's answers played."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload import GraphBuilder, Plan, capture, plan
from offload.errors import MemoryTooSmall
from offload.graph.taskgraph import HOST
from offload.measuring import calibration, profiling
from offload.memory import device_memory, room
from offload.memory.device_memory import (
    DeviceLeft,
    ProcessShare,
    check_device,
    device_left,
    is_on,
)
from offload.memory.host_memory import HostMemoryLeft
from offload.memory.room import check_memory
from offload.memory.workspaces import kept_bytes, steady, warm
from offload.plans.reserve import MIB, bytes_outside_arena, segment_bytes
from offload.program.kernels import Program, Source
from offload.running.stage import Stage

CUDA = torch.device("cuda", 0)
GIB = 1 << 30


def made(fixed: int = 0, unplaced: int = 0, lane: str = "compute") -> Plan:
    """A parameter of 8 MiB on the device that a task changes, and 4 MiB that it returns."""
    builder = GraphBuilder()
    w = builder.buffer("w", 8 * MIB, "parameter")
    y = builder.buffer("y", 4 * MIB)
    builder.task("f", reads=[w], writes=[y], kernel=lambda r, w: None)
    builder.task("u", [w], [w], unplaced=unplaced, lane=lane, kernel=lambda r, w: None)
    builder.output(y)
    tensors: dict[str, Source] = {"w": torch.zeros(8 * MIB, dtype=torch.uint8)}
    graph = builder.graph(Program((), (), tensors, device=CUDA, fixed=fixed))
    return plan(graph, placement="copy")


@pytest.mark.parametrize(
    ("asked", "segment"),
    [(0, 0), (1, 2), (MIB, 2), (MIB + 1, 20), (20 * MIB, 20), (20 * MIB + 1, 22), (33 * MIB, 34)],
)
def test_pieces_take_whole_segments(asked: int, segment: int) -> None:
    assert segment_bytes(asked) == segment * MIB


def test_a_budget_holds_what_libraries_keep_and_what_the_allocator_rounds_up() -> None:
    plain, kept = made(), made(fixed=33 * MIB)
    assert plain.reserve == bytes_outside_arena(0, 0) == 4 * MIB
    assert kept.reserve - plain.reserve == 34 * MIB
    assert kept.device_bytes - plain.device_bytes == 34 * MIB
    assert made(unplaced=MIB).reserve - plain.reserve == 2 * MIB


def test_what_tasks_on_the_host_allocate_is_not_the_devices() -> None:
    assert made(unplaced=MIB, lane="host").reserve == made().reserve


def test_an_arena_that_does_not_fit_is_refused_with_numbers_and_names() -> None:
    found = made(fixed=33 * MIB)
    left = DeviceLeft(
        CUDA,
        free=GIB,
        total=80 * GIB,
        ours=2 * GIB,
        others=(ProcessShare(77, 70 * GIB), ProcessShare(78, None)),
    )
    check_device(found, found.memgraph.arenas, left)
    with pytest.raises(MemoryTooSmall) as told:
        check_device(found, {0: 2 * GIB, HOST: 500 * GIB}, left)
    text = str(told.value)
    for part in (
        "of cuda:0 are needed",
        "2.0 GiB for the arena",
        "1.0 GiB of its 80.0 GiB are free",
        "this process has 2.0 GiB, process 77 has 70.0 GiB, process 78 has an unknown part",
        "give a smaller budget",
    ):
        assert part in text
    assert (told.value.needed, told.value.left) == (2 * GIB + found.reserve, GIB)


def test_without_nvml_the_sum_of_the_others_is_said() -> None:
    left = DeviceLeft(CUDA, free=GIB, total=80 * GIB, ours=9 * GIB)
    with pytest.raises(MemoryTooSmall, match=r"other processes and CUDA itself have 70.0 GiB"):
        check_device(made(), {0: 2 * GIB}, left)


@pytest.mark.parametrize("refused", ["calibrate", "bench", "kernels", "libraries"])
def test_memory_that_is_refused_while_something_is_measured_is_told_with_who_has_it(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")

    left = DeviceLeft(torch.device("cpu"), GIB, 80 * GIB, 0, (ProcessShare(77, 70 * GIB),))
    monkeypatch.setattr(device_memory, "device_left", lambda device: left)
    at: dict[str, tuple[Any, str]] = {
        "calibrate": (calibration, "_bytes"),
        "bench": (profiling, "_Bench"),
        "kernels": (profiling._Bench, "_fill"),
        "libraries": (profiling, "kept_bytes"),
    }
    owner, name = at[refused]
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(MemoryTooSmall, match="too little memory on cpu to measure") as told:
        if refused == "calibrate":
            calibration.calibrate("cpu")
        else:
            capture(torch.nn.ReLU(), torch.zeros(4))
    assert "1.0 GiB of its 80.0 GiB are free" in str(told.value)
    assert "process 77 has 70.0 GiB. End other programs on the device" in str(told.value)
    assert told.value.left == GIB < told.value.needed


def test_the_reader_leaves_this_process_out_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2)
    shares = [ProcessShare(os.getpid(), 2), ProcessShare(1, 5)]
    monkeypatch.setattr(device_memory, "device_processes", lambda device: shares)
    assert device_left(CUDA) == DeviceLeft(CUDA, 3, 10, 2, (ProcessShare(1, 5),))


def test_a_plan_for_a_device_asks_the_machine_for_its_host_arena_alone() -> None:
    found = made()
    check_memory(found, {0: 100 * GIB, HOST: MIB}, HostMemoryLeft(MIB, "a small machine"))
    with pytest.raises(MemoryTooSmall, match=r"arena of the host.*a small machine") as told:
        check_memory(found, {0: MIB, HOST: MIB}, HostMemoryLeft(MIB - 1, "a small machine"))
    assert told.value.needed == MIB


def test_where_a_tensor_of_the_users_is_is_seen_in_all_its_forms() -> None:
    cpu, tensor = torch.device("cpu"), torch.zeros(1)
    assert is_on(tensor, cpu)
    assert is_on([tensor, tensor], cpu)
    assert not is_on(None, cpu)
    assert not is_on(tensor, CUDA)


def test_on_the_cpu_libraries_keep_nothing_and_nothing_is_switched() -> None:
    cpu = torch.device("cpu")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with steady(cpu):
            assert torch.backends.cudnn.benchmark
        warm(cpu)
        assert kept_bytes(cpu) == 0
    finally:
        torch.backends.cudnn.benchmark = before


class Fence:
    """A driver that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def stream(self, lane: str) -> str:
        return lane

    def begin(self) -> None:
        self.asked.append("begin")

    def enqueue(self, stream: str, run: Any) -> None:
        assert run.func is warm
        self.asked.append(stream)

    def end(self) -> None:
        self.asked.append("end")


def test_libraries_are_warm_on_the_compute_stream_once_a_thread_and_inside_a_fence() -> None:
    """Without the fence the caller's current stream would be ours afterwards."""
    driver = Fence()
    stage: Any = SimpleNamespace(device=CUDA, driver=driver, _warmed=set())
    for _ in range(2):
        Stage.warm(stage)
    other = threading.Thread(target=Stage.warm, args=(stage,), name="another thread")
    other.start()
    other.join()
    assert driver.asked == ["begin", "compute", "end"] * 2


def test_a_remark_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made()
    left = DeviceLeft(CUDA, free=GIB, total=GIB)
    monkeypatch.setattr(room, "device_left", lambda device: left)
    monkeypatch.setattr(room, "give_cached_back", lambda device: None)
    assert [found.remarks.add("could not be page-locked") for _ in range(2)] == [True, False]
    assert found.explain().count("could not be page-locked") == 1
    with pytest.raises(MemoryTooSmall):
        room.check_room(found, {0: 2 * GIB})
