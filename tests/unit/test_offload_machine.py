"""What memory the host and a device leave to this process, and plans that do not fit into it.

The device's own calls are played; test_offload_device_memory_gpu.py has the real ones.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import GraphBuilder, Plan, capture, plan
from offload.errors import MemoryTooSmall
from offload.graph.memgraph import Place
from offload.graph.taskgraph import HOST
from offload.measuring import profiling
from offload.memory import arenas as memory
from offload.memory import device_memory, room
from offload.memory.arenas import Arenas
from offload.memory.device_memory import (
    DeviceLeft,
    ProcessShare,
    check_device,
    device_left,
)
from offload.memory.host_memory import HostMemoryLeft, memory_left
from offload.memory.pinned_arena import Runtime
from offload.memory.room import check_memory
from offload.plans.reserve import MIB, bytes_outside_arena, segment_bytes
from offload.program.kernels import Program, Source

GIB = 1 << 30


def written(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def left(folder: Path, membership: str, free: int = 100 * GIB) -> HostMemoryLeft:
    meminfo = f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable: {free // 1024} kB"
    files = written(folder / "proc", membership=membership, meminfo=meminfo)
    return memory_left(folder / "cgroup", files / "membership", files / "meminfo")


def test_without_cgroups_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    found = left(tmp_path, "0::/", 3 * GIB)
    assert found.nbytes == 3 * GIB
    assert "3.0 GiB of this machine's" in found.where
    assert memory_left(tmp_path, tmp_path, tmp_path).where.startswith("this machine has")


def test_the_limit_of_a_cgroup_less_what_is_in_use_and_does_not_give_way(tmp_path: Path) -> None:
    stat = (
        f"anon {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\nslab_reclaimable {GIB // 4}"
    )
    written(
        tmp_path / "cgroup/job/step",
        memory__max=4 * GIB,
        memory__current=2 * GIB,
        memory__stat=stat,
    )
    written(tmp_path / "cgroup/job", memory__max="max", memory__current=2 * GIB)
    found = left(tmp_path, "0::/job/step")
    assert found.nbytes == 3 * GIB
    assert "cgroup is 4.0 GiB" in found.where and "1.0 GiB of it are in use" in found.where


def test_the_tightest_group_on_the_way_up_binds_and_so_does_the_machine(tmp_path: Path) -> None:
    written(tmp_path / "cgroup/job/step", memory__max=8 * GIB, memory__current=0)
    written(tmp_path / "cgroup/job", memory__max=5 * GIB, memory__current=3 * GIB)
    assert left(tmp_path, "0::/job/step").nbytes == 2 * GIB
    assert left(tmp_path, "0::/job/step", GIB).nbytes == GIB
    # In a container the path is the host's, and the mount is the group.
    written(tmp_path / "cgroup", memory__max=2 * GIB, memory__current=3 * GIB)
    assert left(tmp_path, "0::/somewhere/else").nbytes == 0


def test_version_1_says_the_same_in_other_words(tmp_path: Path) -> None:
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    written(
        tmp_path / "cgroup/memory/job",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=2 * GIB,
        memory__stat=stat,
    )
    membership = "9:name=systemd:/\n4:memory:/job\n3:cpu,cpuacct:/other\n0::/"
    assert left(tmp_path, membership).nbytes == 3 * GIB
    written(tmp_path / "cgroup/memory/job", memory__limit_in_bytes=9223372036854771712)
    assert left(tmp_path, membership).nbytes == 100 * GIB


@pytest.fixture
def step() -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 4))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(module(x), y)
        loss.backward()
        return loss.detach()

    batch = torch.randn(64, 512), torch.randint(0, 4, (64,))
    return module, offload.capture(added, *batch), batch


def test_a_plan_that_does_not_fit_is_refused_with_who_needs_what(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, graph, _ = step
    plan = offload.plan(graph)
    at = [p.data_ptr() for p in module.parameters()]
    monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(1 << 20, "the cgroup is small"))
    with pytest.raises(MemoryTooSmall, match=r"only 1\.0 MiB are left: the cgroup") as refused:
        offload.Runner(plan)
    said = str(refused.value)
    assert plan.explain() in said
    assert "the arena of device 0" in said and "host_budget" in said
    assert refused.value.left == 1 << 20 < refused.value.needed
    assert [p.data_ptr() for p in module.parameters()] == at


def test_tensors_that_move_into_an_arena_count_once_and_the_largest_twice(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, graph, batch = step
    plan = offload.plan(graph)
    with pytest.raises(MemoryTooSmall) as refused:
        monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(0, ""))
        offload.Runner(plan)
    needed = refused.value.needed
    weights = sum(p.nbytes for p in module.parameters())
    largest = max(p.nbytes for p in module.parameters())
    arenas = sum(plan.memgraph.arenas.values())
    assert needed == max(2 * weights, arenas - 2 * weights + largest + 4)  # 4: the loss
    for nbytes, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(room, "memory_left", lambda nbytes=nbytes: HostMemoryLeft(nbytes, ""))
        if fits:
            with offload.Runner(plan) as runner:
                runner(*batch)
        else:
            with pytest.raises(MemoryTooSmall):
                offload.Runner(plan)


def test_arenas_that_grow_are_checked_with_what_the_kernels_of_the_entering_plan_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(nbytes: int, unplaced: int) -> offload.TaskGraph:
        builder = offload.GraphBuilder()
        y = builder.buffer("y", nbytes)
        builder.task("f", writes=[y], unplaced=unplaced, kernel=lambda r, w: w[0].fill_(1))
        builder.output(y)
        return builder.graph()

    with offload.Runner(offload.plan(made(64, 0), placement="copy")) as runner:
        runner.add("large", made(4096, 64 << 20))
        monkeypatch.setattr(
            room, "memory_left", lambda: HostMemoryLeft(32 << 20, "a small machine")
        )
        with pytest.raises(MemoryTooSmall, match=r"kernels besides 64\.0 MiB"):
            runner.run("large")
        monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(65 << 20, "a larger one"))
        [y] = runner.run("large")
    assert int(y.sum()) == 4096


CUDA = torch.device("cuda", 0)


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


def test_an_arena_that_does_not_fit_is_refused_with_numbers_and_names() -> None:
    found = made(fixed=33 * MIB)
    left = DeviceLeft(
        CUDA,
        free=GIB,
        total=80 * GIB,
        ours=2 * GIB,
        others=(ProcessShare(77, 70 * GIB), ProcessShare(78, None)),
    )
    check_device(found, found.memgraph.arenas[0], left)
    with pytest.raises(MemoryTooSmall) as told:
        check_device(found, 2 * GIB, left)
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
        check_device(made(), 2 * GIB, left)


def test_memory_that_is_refused_while_something_is_measured_is_told_with_who_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")

    left = DeviceLeft(torch.device("cpu"), GIB, 80 * GIB, 0, (ProcessShare(77, 70 * GIB),))
    monkeypatch.setattr(device_memory, "device_left", lambda device: left)
    monkeypatch.setattr(profiling, "kept_bytes", full)
    with pytest.raises(MemoryTooSmall, match="too little memory on cpu to measure") as told:
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
